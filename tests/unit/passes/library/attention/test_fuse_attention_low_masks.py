"""Causal masks that close with a finite number: positions where it is as good as -inf, else the reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.export import Dim

from attention_cases import INF, SCALE, Fn, S, attend, causal, close, fuse, options, tensors
from marks import examples

F32_MIN, BF16_MIN = torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def scores(q, k, scale=SCALE):
    return q @ k.transpose(2, 3) * scale


def bias(q, value, allowed=None):
    """The mask as a tensor that is added, of the scores' dtype."""
    allowed = causal(q.shape[2]) if allowed is None else allowed
    return torch.where(allowed, 0.0, value).to(q.dtype)


def added(value):
    return lambda q, k, v: attend(scores(q, k) + bias(q, value), v)


def triu(value):
    def attention(q, k, v):
        mask = torch.full((q.shape[2], q.shape[2]), value, dtype=q.dtype).triu(1)
        return attend(scores(q, k) + mask, v)

    return attention


def filled_zeros(value):
    def attention(q, k, v):
        mask = torch.zeros(q.shape[2], q.shape[2], dtype=q.dtype).masked_fill(~causal(q.shape[2]), value)
        return attend(scores(q, k) + mask[None, None], v)

    return attention


def filled(value):
    return lambda q, k, v: attend(scores(q, k).masked_fill(~causal(q.shape[2]), value), v)


def sdpa(value):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bias(q, value))


SPELLINGS = {"added": added, "triu": triu, "filled zeros": filled_zeros, "sdpa": sdpa, "filled": filled}
AS_INF = [
    ("float32", BF16_MIN),
    ("float32", F32_MIN),
    ("float32", -3e38),
    ("bfloat16", BF16_MIN),
    ("float16", -65504.0),
]
TOO_HIGH = [("float32", -65504.0), ("float32", -1e9), ("bfloat16", -65504.0), ("bfloat16", -1e9), ("float32", -1e4)]


def check(gm, function, dtype, *args):
    exact = function(*(a.double() for a in args))
    got, wanted = gm(*args).double(), function(*args).double()
    limit = 1.5 * (wanted - exact).abs().max() + 2 * torch.finfo(dtype).eps
    assert (got - exact).abs().max() <= limit, "further from float64 than eager"
    open_to_all = F.scaled_dot_product_attention(*(a.double() for a in args))
    assert (open_to_all - exact).abs().max() > limit, "attention without its mask would pass"


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("dtype", "value"), AS_INF)
def test_a_number_that_no_score_reaches_is_causal(spelling, dtype, value):
    function = SPELLINGS[spelling](value)
    args = tensors(DTYPES[dtype])
    gm, record, _ = fuse(Fn(function), args)
    assert len(record.matches) == 1 and record.matches[0].note == "", record
    assert options(gm)["is_causal"] and options(gm)["mask"] is None
    check(gm, function, DTYPES[dtype], *args)


@pytest.mark.parametrize("spelling", ["added", "triu", "filled zeros", "sdpa"])
@pytest.mark.parametrize(("dtype", "value"), TOO_HIGH)
def test_a_number_that_scores_may_undercut_stays_and_says_why(spelling, dtype, value):
    function = SPELLINGS[spelling](value)
    args = tensors(DTYPES[dtype])
    gm, record, _ = fuse(Fn(function), args)
    (match,) = record.matches
    assert "stays a tensor: it closes with" in match.note and "close with -inf" in match.note
    assert not options(gm)["is_causal"]
    check(gm, function, DTYPES[dtype], *args)


def test_scores_that_undercut_it_make_a_difference():
    """Why such a mask must stay: with large scores the closed keys do have weight."""
    function, (q, k, v) = added(-1e4), tensors()
    gm, _, _ = fuse(Fn(function), (q, k, v))
    got, wanted = gm(300 * q, 300 * k, v), function(300 * q, 300 * k, v)
    close(got, wanted)
    assert (F.scaled_dot_product_attention(300 * q, 300 * k, v, is_causal=True) - wanted).abs().max() > 0.1


@pytest.mark.parametrize("value", [-65504.0, -1e9, -1e4])
def test_filled_scores_are_refused_with_what_to_do(value):
    _, record, _ = fuse(Fn(filled(value)), tensors())
    assert not record.matches and "neither -inf nor the lowest" in record.reason and "fill with -inf" in record.reason


@pytest.mark.parametrize(("value", "is_causal"), [(-65504.0, True), (-1e9, True), (-1e4, True), (-150.0, False)])
def test_a_soft_cap_bounds_the_scores(value, is_causal):
    """Two scores under a cap of 30 are at most 60 apart."""

    def capped(q, k, v):
        return attend(torch.tanh(scores(q, k) / 30.0) * 30.0 + bias(q, value), v)

    args = tensors()
    gm, record, _ = fuse(Fn(capped), args)
    assert options(gm)["is_causal"] is is_causal and bool(record.matches[0].note) is not is_causal
    for factor in (1, 1000):
        large = (factor * args[0], *args[1:])
        close(gm(*large), capped(*large))


@pytest.mark.parametrize("value", [BF16_MIN, F32_MIN])
def test_a_row_without_any_key_keeps_its_mean(value):
    """Closed with a finite number it is the mean of all values, which is_causal would not give."""

    def before(q, k, v):
        return attend(scores(q, k) + bias(q, value, ~torch.ones(S, S, dtype=torch.bool).triu()), v)

    args = tensors()
    gm, record, _ = fuse(Fn(before), args)
    assert "leaves a query without any key" in record.matches[0].note
    close(gm(*args), before(*args))
    torch.testing.assert_close(gm(*args)[:, :, 0], args[2].mean(2), rtol=1e-5, atol=1e-5)


def test_any_length():
    s = Dim("s", min=2, max=64)
    function, args = added(BF16_MIN), tensors()
    gm, record, _ = fuse(Fn(function), args, dynamic_shapes=(({2: s},) * 3,))
    assert options(gm)["is_causal"] and not record.matches[0].note
    other = tensors(s=11, t=11)
    close(gm(*other), function(*other))


def slopes(q, k, v):
    position = torch.arange(S, dtype=q.dtype)
    return attend(scores(q, k) + (position[None] - position[:, None]) * 0.5, v)


def ahead(q, k, v):
    i = torch.arange(S)
    return attend(scores(q, k) + bias(q, INF, i[None] <= i[:, None] + 1), v)


def two_sequences(q, k, v):
    one = torch.stack((causal(S), torch.ones(S, S, dtype=torch.bool)))[:, None]
    return attend(scores(q, k) + bias(q, INF, one), v)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (slopes, "more than 0 and one low number"),
        (ahead, "neither causal nor a window"),
        (two_sequences, "differ between sequences or heads"),
    ],
)
def test_every_mask_that_stays_says_why(function, reason):
    args = tensors()
    gm, record, _ = fuse(Fn(function), args)
    assert reason in record.matches[0].note, record
    close(gm(*args), function(*args))


def test_a_mask_of_the_caller_says_so():
    def function(q, k, v, mask):
        return attend(scores(q, k) + mask, v)

    args = (*tensors(), torch.randn(S, S))
    gm, record, _ = fuse(Fn(function), args)
    assert "does not follow from sizes alone" in record.matches[0].note
    close(gm(*args), function(*args))


@settings(max_examples=examples(15), deadline=None)
@given(
    value=st.sampled_from([INF, F32_MIN, BF16_MIN, -1e38, -1e30, -1e9, -65504.0, -1e4, -100.0, -1.0]),
    factor=st.sampled_from([0.01, 1.0, 30.0, 300.0]),
    cap=st.sampled_from([None, 5.0, 50.0]),
    spelling=st.sampled_from(["added", "filled", "sdpa"]),
    strict=st.booleans(),
)
def test_any_closing_number_gives_eager_s_values(value, factor, cap, spelling, strict):
    """Whatever a mask closes with, and with or without a key for the first query, what fuses gives eager's values."""
    allowed = ~torch.ones(S, S, dtype=torch.bool).triu(0 if strict else 1)

    def function(q, k, v):
        if spelling == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias(q, value, allowed))
        raw = scores(q, k)
        raw = torch.tanh(raw / cap) * cap if cap else raw
        return attend(raw.masked_fill(~allowed, value) if spelling == "filled" else raw + bias(q, value, allowed), v)

    q, k, v = tensors(seed=1)
    gm, _, _ = fuse(Fn(function), (q, k, v))
    got, wanted = gm(factor * q, k, v), function(factor * q, k, v)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
