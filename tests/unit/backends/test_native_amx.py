"""GEMMs of many tokens with bfloat16 weights on AMX: emulated here, and the instructions where they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marks import examples
from native_build import with_amx
from native_linear_cases import ACTS, Data, Product, close, make, run
from native_linear_cases import expected as in_float32

TARGETS = with_amx()
pytestmark = pytest.mark.skipif(not TARGETS, reason="no C++ compiler (g++ or clang++) on this machine")
every_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.isa)


def expected(p: Product, d: Data) -> tuple[torch.Tensor, torch.Tensor]:
    """Two numbers of 8 bits are off by up to 2^-18, four units of float32."""
    y, slack = in_float32(p, d)
    return y, 2 * slack


PRODUCTS = [
    Product("bf16", 9, 32, 16),
    Product("bf16", 16, 576, 96, norm=True),
    Product("bf16", 17, 100, 50, threads=2, norm=True, gap=3),  # columns that end in the middle of an operand
    Product("bf16", 32, 64, 33, act="silu", bias=True, residual=True),
    Product("bf16", 33, 20, 40, threads=3, act="gelu_tanh"),
    Product("bf16", 70, 36, 17, normed=True, in_place=True, offset=1.0),
    Product("bf16", 140, 40, 80, threads=2, bias=True),  # more than a span of tokens, five tiles
    Product("bf16", 257, 33, 50, threads=3, act="silu", norm=True),
]


@every_target
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda p: f"{p.tokens}x{p.k}x{p.n}-{p.act}")
def test_agrees_with_float64(target, product):
    d = make(product)
    found = run(product, d, target)
    assert close(found, expected(product, d))
    assert not close(found, expected(product, replace(d, x=d.x.bfloat16().float())))  # x keeps more than 8 bits


@every_target
def test_wrong_variants_are_noticed(target):
    p = Product("bf16", 20, 96, 48, bias=True, norm=True, act="silu", residual=True)
    d = make(p)
    found = run(p, d, target)
    assert close(found, expected(p, d))
    for wrong in (replace(p, bias=False), replace(p, norm=False), replace(p, offset=1.0), replace(p, act="gelu")):
        assert not close(found, expected(wrong, d)), wrong
    assert not close(found, expected(p, replace(d, x=d.x.roll(1, 0))))
    assert not close(found, expected(p, replace(d, x=d.x.roll(1, 1))))
    one = d.packed.data.clone()
    one[-1] ^= 0x40  # one weight of the last row
    assert not close(run(p, replace(d, packed=replace(d.packed, data=one)), target), expected(p, d))


@settings(max_examples=examples(60), deadline=None)
@given(
    tokens=st.integers(7, 40), k=st.integers(1, 140), n=st.integers(1, 40), threads=st.sampled_from([1, 2, 3]),
    norm=st.booleans(), act=st.sampled_from(ACTS), gap=st.integers(0, 9), shared=st.booleans(),
    target=st.sampled_from(TARGETS or [None]),
)  # fmt: skip
def test_any_size_agrees(tokens, k, n, threads, norm, act, gap, shared, target):
    p = Product("bf16", tokens, k, n, threads, False, norm, 0.5, False, act, True, False, gap, shared)
    d = make(p)
    assert close(run(p, d, target), expected(p, d))


@every_target
@pytest.mark.parametrize("norm", [False, True])
def test_what_is_not_finite_stays_in_its_row(target, norm):
    p = Product("bf16", 19, 70, 20, threads=2, norm=norm)
    d = make(p)
    clean = run(p, d, target)
    d.x[1, 33], d.x[2, 69], d.x[18, 0] = float("nan"), float("inf"), float("-inf")
    found = run(p, d, target)
    assert found[1].isnan().all() and not found[[2, 18]].isfinite().any()
    assert norm or found[[2, 18]].isinf().all()  # and no NaN, which inf - inf would be
    assert torch.equal(found[0], clean[0]) and torch.equal(found[3:18], clean[3:18])


@every_target
def test_the_result_does_not_depend_on_threads(target):
    p = Product("bf16", 21, 128, 320, norm=True, act="silu")
    d = make(p)
    one = run(p, d, target)
    assert all(torch.equal(run(replace(p, threads=threads), d, target), one) for threads in (2, 3, 5))
