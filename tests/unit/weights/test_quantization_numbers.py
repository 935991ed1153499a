"""Quantized weights as numbers: how far they are from the originals, how they are packed, what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.base.errors import QuantizationError
from graft.weights import quantize as quantizing
from graft.weights.packing import GROUP, dequantize, pack_bytes, pack_int4, unpack_bytes, unpack_int4
from graft.weights.quantize import (
    QUANTIZERS,
    check_fp8,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    stored,
)
from graft.weights.rounding import HALF, SLACK, measure
from marks import examples

FORMATS = ("int8", "int4", "fp8")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# relative error of normal weights: a step is 1/127, 1/7 of about 3 deviations (128 of them), 1/8 of a number
USUAL = {"int8": 0.012, "int4": 0.13, "fp8": 0.04}


def normal(n: int, k: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def back(weight: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return dequantize(q, scale, weight.shape[1], torch.float64)


@st.composite
def weights(draw):
    """Odd sizes, rows of very different magnitudes, zero rows, lonely large values, every working dtype."""
    n, k = draw(st.integers(1, 7)), draw(st.sampled_from([1, 5, 127, 128, 129, 576, 1024, 1025, 1500]))
    w = normal(n, k, draw(st.integers(0, 99)))
    w *= torch.tensor([draw(st.sampled_from([0.0, 1e-4, 0.02, 1.0, 50.0])) for _ in range(n)])[:, None]
    if draw(st.booleans()):
        w[draw(st.integers(0, n - 1)), draw(st.integers(0, k - 1))] *= 20
    return w.to(draw(st.sampled_from(DTYPES)))


# ── rounding ─────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=examples(60), deadline=None)
@given(weights(), st.sampled_from(FORMATS))
def test_every_weight_is_the_nearest_number(w, kind):
    """In float64 and without the project's own check: within half a step of where it was, clipped ones aside."""
    q, scale = QUANTIZERS[kind](w)
    exact, result = w.double(), back(w, q, scale)
    if kind == "int8":
        allowed = scale.double()[:, None] / 2
    elif kind == "fp8":
        allowed = torch.maximum(exact.abs() / 16, scale.double()[:, None] * 2**-10)
    else:
        step = scale.double().abs().repeat_interleave(GROUP, 1)[:, : w.shape[1]]
        inside = unpack_int4(q, w.shape[1]).abs() < 7  # what is clipped may be further off
        allowed = torch.where(inside, step / 2, exact.abs())
    assert ((result - exact).abs() <= allowed * (1 + 1e-5) + 1e-30).all()
    measured = measure(w, q, scale)
    assert measured.steps <= HALF + SLACK
    norm = exact.norm()
    torch.testing.assert_close(
        torch.tensor(measured.relative),
        ((result - exact).norm() / norm if norm else norm).float(),
        rtol=1e-3,
        atol=1e-6,
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_the_usual_error_of_each_format(kind):
    w = normal(64, 1024)
    found = measure(w, *QUANTIZERS[kind](w)).relative
    assert USUAL[kind] / 2 < found < USUAL[kind]


@settings(max_examples=examples(40), deadline=None)
@given(weights())
def test_the_search_never_loses_to_plain_scaling(w):
    """Group by group, in float64."""

    def errors(search: bool) -> torch.Tensor:
        q, scale = quantize_int4(w, search=search)
        difference = (back(w, q, scale) - w.double()).square()
        padded = torch.nn.functional.pad(difference, (0, -w.shape[1] % GROUP))
        return padded.view(w.shape[0], -1, GROUP).sum(-1)

    plain, best = errors(False), errors(True)
    assert (best <= plain * (1 + 1e-5)).all()


def test_the_search_gains_and_turns_scales_around():
    w = normal(32, 1024, 3)
    plain, best = (measure(w, *quantize_int4(w, search=search)).relative for search in (False, True))
    assert best < 0.92 * plain
    _, scale = quantize_int4(w)
    assert 0.1 < (scale < 0).float().mean() < 0.9  # the largest magnitude is -8, whichever sign it had
    single = torch.zeros(1, 128)
    single[0, 5] = 4.0
    q, scale = quantize_int4(single)
    assert back(single, q, scale)[0, 5] == pytest.approx(4.0)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scale_is_rounded_before_the_weights(kind, dtype):
    """Dividing by an unrounded scale would put some weights of a bfloat16 group on the wrong side."""
    w = normal(5, 300, 7, dtype)
    q, scale = QUANTIZERS[kind](w)
    assert scale.dtype is (dtype if kind == "int4" else torch.float32)
    assert scale.shape == ((5, 3) if kind == "int4" else (5,))
    assert q.dtype is {"int8": torch.int8, "int4": torch.int16, "fp8": torch.float8_e4m3fn}[kind]
    assert q.shape == ((5, 128) if kind == "int4" else (5, 320))
    assert measure(w, q, scale).steps <= HALF + SLACK


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_go_in_pieces_and_the_pieces_do_not_show(kind, monkeypatch):
    w = normal(7, 1500, 11, torch.bfloat16)
    whole = QUANTIZERS[kind](w)
    for piece in (1, 1500, 4000):
        monkeypatch.setattr(quantizing, "PIECE", piece)
        for one, other in zip(whole, QUANTIZERS[kind](w), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("kind", FORMATS)
def test_zeros_stay_zeros_and_nothing_divides_by_zero(kind):
    w = normal(3, 260)
    w[1] = 0
    w[2, 128:] = 0
    q, scale = QUANTIZERS[kind](w)
    result = back(w, q, scale)
    assert torch.isfinite(result).all() and (scale != 0).all()
    assert (result[1] == 0).all() and (result[2, 128:] == 0).all()
    assert measure(torch.zeros(2, 4), *QUANTIZERS[kind](torch.zeros(2, 4))).relative == 0
    assert QUANTIZERS[kind](torch.zeros(0, 4))[0].shape[0] == 0


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_refused_by_name(kind, bad):
    w = normal(4, 130)
    w[2, 129] = bad
    with pytest.raises(QuantizationError, match=r"model\.up\.weight holds NaN or infinity"):
        QUANTIZERS[kind](w, "model.up.weight")


def test_other_dtypes_are_refused():
    with pytest.raises(QuantizationError, match=r"torch\.float64 are not quantized"):
        quantize_int8(normal(2, 2).double())


def test_float16_scales_reach_into_the_subnormal_range():
    w = (normal(2, 128) * 1e-6).half()
    q, scale = quantize_int4(w)
    assert measure(w, q, scale).relative < 0.5 and (scale.abs() < torch.finfo(torch.float16).tiny).all()
    assert stored(torch.tensor([1e-9, 0.0]), torch.float16).tolist() == [2.0**-24] * 2


def test_a_device_without_float8_says_so(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("not implemented for 'Float8_e4m3fn'")

    monkeypatch.setattr(torch, "ones", broken)
    with pytest.raises(QuantizationError, match=r"has no float8 numbers on cpu .*use int8"):
        check_fp8(torch.device("cpu"))
    with pytest.raises(QuantizationError, match="float8"):
        quantize_fp8(normal(2, 2))


# ── the check ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("wrong", ["next row", "doubled", "all clipped", "one weight"])
def test_more_than_rounding_is_caught(kind, wrong):
    w = normal(6, 1100, 5)
    q, scale = QUANTIZERS[kind](w)
    measure(w, q, scale)
    if wrong == "next row":
        scale = scale.roll(1, 0)
    elif wrong == "doubled":
        scale = scale * 2
    elif wrong == "all clipped":  # consistent with its scale, and still wrong
        q, scale = QUANTIZERS[kind](w / w.abs().clamp(min=1e-6) * w.abs().amin(-1, keepdim=True).clamp(min=0.01))
    else:
        q = q.clone()
        q.view(torch.uint8)[3, 17] ^= 0x04 if kind == "int4" else 0x40
    with pytest.raises(QuantizationError, match="the layer"):
        measure(w, q, scale, "the layer")


# ── packing ──────────────────────────────────────────────────────────────────────────────────────────────────────


def slow_pack(row: list[int]) -> list[int]:
    """The format in plain Python, from its description: nibble i of word j is weight j of group i of the span."""
    words = []
    for span in range(0, len(row), 512):
        for j in range(128):
            word = 0
            for i in range(4):
                place = span + 128 * i + j
                word |= ((row[place] if place < len(row) else 0) + 8) << (4 * i)
            words.append(word - (1 << 16) if word >= 1 << 15 else word)
    return words


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(1, 3), st.sampled_from([1, 100, 128, 512, 577, 1025, 2100]), st.integers(0, 999))
def test_packing_is_the_format_and_unpacking_its_inverse(n, k, seed):
    q = torch.randint(-8, 8, (n, k), generator=torch.Generator().manual_seed(seed))
    words = pack_int4(q)
    assert words.tolist() == [slow_pack(row) for row in q.tolist()]
    assert torch.equal(unpack_int4(words, k), q.to(torch.int8))
    assert k < 2 or words.tolist() != [slow_pack(row[::-1]) for row in q.tolist()] or q.tolist() == q.flip(1).tolist()


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(1, 3), st.sampled_from([1, 31, 32, 64, 65, 100, 200]), st.sampled_from(["int8", "fp8"]))
def test_bytes_are_packed_two_runs_to_a_word(n, k, kind):
    q = torch.arange(n * k).remainder(120).view(n, k).to(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    packed = pack_bytes(q)
    assert packed.dtype is q.dtype and packed.shape == (n, -(-k // 64) * 64)
    flat, wide = q.float(), packed.float()
    if kind == "int8":
        wide = packed.view(torch.uint8).float() - 128
    for place in range(packed.shape[1]):
        span, inside = divmod(place, 64)
        source = 64 * span + 32 * (inside % 2) + inside // 2
        assert torch.equal(wide[:, place], flat[:, source] if source < k else torch.zeros(n))
    assert torch.equal(unpack_bytes(packed, k).float(), flat)


def test_each_group_has_its_own_scale():
    """Weights of one group scaled by ten keep their relative error; with one scale a row they would be crushed."""
    w = normal(2, 512, 9)
    w[:, 128:256] *= 100
    result = back(w, *quantize_int4(w))
    small = torch.cat([w[:, :128], w[:, 256:]], 1).double()
    kept = torch.cat([result[:, :128], result[:, 256:]], 1)
    assert (kept - small).norm() / small.norm() < 0.13
    crushed = back(w, *quantize_int8(w))
    assert (crushed[:, :128] - w[:, :128]).norm() / w[:, :128].norm() > 0.2
