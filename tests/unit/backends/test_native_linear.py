"""The native product: every kind of weight, prologue and epilogue against float64, on every instruction set here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.weights.native_tiles import pack, unpack
from marks import FULL, examples, short
from native_build import every_target, targets
from native_linear_cases import ACTS, KINDS, Product, close, expected, make, packing, run

PRODUCTS = [
    Product("f32", 1, 576, 96, norm=True),
    Product("f32", 2, 64, 40, bias=True, residual=True, gap=5),
    Product("f32", 1, 96, 64, act="silu", norm=True, offset=1.0),
    Product("f32", 5, 33, 17, act="gelu_tanh", bias=True),
    Product("f32", 8, 48, 33, threads=2, normed=True, act="gelu", residual=True),
    Product("f32", 19, 100, 50, threads=2, norm=True, gap=3),
    Product("f32", 11, 40, 36, threads=2, norm=True, shared=False),
    Product("f32", 7, 32, 16, in_place=True, gap=16),
    Product("f32", 205, 20, 40, threads=2, act="silu"),  # many passes
]
TARGETS = [t for t in targets() if not t.runner][0 if FULL else -1 :]  # quick to call


@pytest.mark.parametrize("target", every_target(widest=True))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda p: f"{p.tokens}x{p.k}x{p.n}-{p.act}")
def test_agrees_with_float64(target, kind, product):
    p = replace(product, kind=kind)
    d = make(p)
    assert close(run(p, d, target), expected(p, d))


@pytest.mark.parametrize("target", every_target(widest=True))
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_variants_are_noticed(target, kind):
    p = Product(kind, 3, 96, 48, bias=True, norm=True, act="silu", residual=True)
    d = make(p)
    found = run(p, d, target)
    assert close(found, expected(p, d))
    for wrong in (
        replace(p, bias=False), replace(p, norm=False), replace(p, norm=False, normed=True), replace(p, offset=1.0),
        replace(p, act="gelu"), replace(p, act="gelu_tanh"), replace(p, residual=False),
    ):  # fmt: skip
        assert not close(found, expected(wrong, d)), wrong
    swapped = replace(d.packed, data=d.packed.data.view(2, -1).flip(0).flatten())
    assert not close(run(p, replace(d, packed=swapped), target), expected(p, d))
    one = d.packed.data.clone()
    one[-65 if kind in ("f16", "halves") else -1] ^= (
        0xFF if kind == "q4" else 0x40
    )  # one weight of the last row, or two
    assert not close(run(p, replace(d, packed=replace(d.packed, data=one)), target), expected(p, d))


@pytest.mark.parametrize("target", every_target(widest=True))
@pytest.mark.parametrize("tokens", [1, 3, 21])
@pytest.mark.parametrize(("x_by", "w_by"), [(1e-30, 1e30), (1e30, 1e-30), (3e4, 1e5), (1.0, 1.0)])
def test_16_bits_for_numbers_of_any_size(target, x_by, w_by, tokens):
    p = Product("halves", tokens, 96, 48, threads=2)
    d = make(p)
    weight = unpack(d.packed) * w_by
    weight[3, 5] *= 1000  # an outlier leaves the others their bits
    d = replace(d, x=d.x * x_by, packed=pack(weight, "f16", False))
    assert close(run(p, d, target), expected(p, d))
    assert not close(run(p, replace(d, x=d.x.flip(1)), target), expected(p, d))
    zeros = replace(d, x=torch.zeros_like(d.x))
    assert close(run(p, zeros, target), expected(p, zeros))


@pytest.mark.parametrize("target", every_target(widest=True))
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden_in_16_bits(target, bad):
    p = Product("halves", 9, 64, 40)
    d = make(p)
    x = d.x.clone()
    x[4, 7] = bad
    found = run(p, replace(d, x=x), target)
    assert not found[4].isfinite().any() and close(found[:4], tuple(part[:4] for part in expected(p, d)))
    weight = unpack(d.packed)
    weight[17, 3] = bad
    found = run(p, replace(d, packed=pack(weight, "f16", False)), target)
    assert not found[:, 17].isfinite().any() and found[:, :17].isfinite().all()


@pytest.mark.skipif(not TARGETS, reason="no C++ compiler on this machine")
@settings(max_examples=examples(150), deadline=None)
@given(
    kind=st.sampled_from(KINDS), tokens=st.integers(0, 23), k=st.integers(1, 140), n=st.integers(1, 70),
    threads=st.sampled_from([1, 2, 3]), bias=st.booleans(), norm=st.booleans(), act=st.sampled_from(ACTS),
    residual=st.booleans(), gap=st.integers(0, 9), shared=st.booleans(),
    target=st.sampled_from(TARGETS or [None]), seed=st.integers(0, 9),
)  # fmt: skip
def test_any_size_agrees(kind, tokens, k, n, threads, bias, norm, act, residual, gap, shared, target, seed):
    p = Product(kind, tokens, k, n, threads, bias, norm, 0.5, False, act, residual, False, gap, shared, seed)
    d = make(p)
    assert close(run(p, d, target), expected(p, d))


@pytest.mark.parametrize("target", every_target(widest=True))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [3, 12])
def test_nan_and_inf_stay_in_their_row(target, kind, tokens):
    for norm in (False, True):
        p = Product(kind, tokens, 70, 20, threads=2, norm=norm)
        d = make(p)
        clean = run(p, d, target)
        d.x[1, 33] = float("nan")
        d.x[2, 69] = float("inf")
        found = run(p, d, target)
        assert found[1].isnan().all() and not found[2].isfinite().any()
        assert torch.equal(found[0], clean[0]) and torch.equal(found[3:], clean[3:])


@pytest.mark.parametrize("target", every_target(widest=True))
@pytest.mark.parametrize("kind", short(KINDS, "bf16", "q4"))
def test_nan_weight_stays_in_its_column(target, kind):
    p = Product(kind, 2, 64, 24)
    d = make(p)
    weight = torch.randn(24, 64)
    weight[17, 40] = float("nan")
    found = run(p, replace(d, packed=pack(weight, packing(kind))), target)
    assert found[:, 17].isnan().all() and found[:, :17].isfinite().all() and found[:, 18:].isfinite().all()


@pytest.mark.parametrize("target", every_target(widest=True))
@pytest.mark.parametrize("kind", KINDS)
def test_the_result_does_not_depend_on_threads(target, kind):
    p = Product(kind, 1, 128, 320, norm=True, act="silu")
    d = make(p)
    one = run(p, d, target)
    for threads in (2, 3, 5):
        assert torch.equal(run(replace(p, threads=threads), d, target), one)
