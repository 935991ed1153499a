"""fuse_attention: random mixtures of masks, biases and caps, and sinks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import (
    INF,
    B,
    D,
    Fn,
    H,
    S,
    attend,
    close,
    fuse,
    lowest,
    options,
    repeat_kv,
    tensors,
)
from attention_masks import positional, scores
from graft.ops.attention.reference import attention
from marks import examples

# ── random mixtures ─────────────────────────────────────────────────────────────────────────────────────────────

MIXTURES = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
        "scale": st.sampled_from(["q", "k", "both", "scores", "divided", "none"]),
        "mask": st.sampled_from(["none", "causal", "window", "padding", "padding lowest", "alibi", "added", "both"]),
        "cap": st.sampled_from([None, 2.0, 30.0]),
        "sinks": st.booleans(),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
        "sizes": st.sampled_from([(1, 5), (5, 5), (3, 7)]),
        "view": st.sampled_from(["heads", "flat"]),
    }
)


def mixture(m, q, k, v, seen, bias, sinks):
    (h, kv), (s, t) = m["heads"], m["sizes"]
    k, v = repeat_kv(k, h // kv), repeat_kv(v, h // kv)
    if m["scale"] in ("q", "both"):
        q = q * 0.5
    if m["scale"] in ("k", "both"):
        k = k * 0.6
    x = q @ k.transpose(2, 3)
    x = x * 0.4 if m["scale"] == "scores" else x / 2.5 if m["scale"] == "divided" else x
    x = torch.tanh(x / m["cap"]) * m["cap"] if m["cap"] else x
    if m["mask"] in ("causal", "both", "alibi"):
        x = x.masked_fill(~positional("causal", s, t), INF)
    if m["mask"] == "window":
        x = x.masked_fill(~positional("window", s, t), lowest(x))
    if m["mask"] in ("padding", "both"):
        x = x.masked_fill(~seen[:, None, None, :], INF)
    if m["mask"] == "padding lowest":
        x = torch.where(seen[:, None, None, :], x, lowest(x))
    x = x + bias if m["mask"] in ("alibi", "added") else x
    if m["sinks"]:
        x = torch.cat([x, sinks.reshape(1, -1, 1, 1).expand(B, -1, s, -1)], -1)
        x = x - x.max(-1, keepdim=True).values
        out = F.softmax(x, -1, dtype=x.dtype)[..., :-1] @ v
    else:
        out = attend(x, v)
    return out if m["view"] == "heads" else out.transpose(1, 2).reshape(B, s, h * D)


@settings(max_examples=examples(25), deadline=None)
@given(MIXTURES, st.integers(0, 1000))
def test_random_mixtures_keep_their_numbers(m, seed):
    generator = torch.Generator().manual_seed(seed)
    (h, kv), (s, t) = m["heads"], m["sizes"]
    shapes = ((B, h, s, D), (B, kv, t, D), (B, kv, t, D))
    q, k, v = (torch.randn(shape, generator=generator).to(m["dtype"]) for shape in shapes)
    seen = torch.rand(B, t, generator=generator) > 0.4
    bias = torch.randn(h, s, t, generator=generator).to(m["dtype"])
    sinks = torch.randn(h, generator=generator).to(m["dtype"])
    inputs = (q, k, v, seen, bias, sinks)
    gm, record, _ = fuse(Fn(lambda *args: mixture(m, *args)), inputs)
    assert (len(record.matches), record.near_misses) == (1, ())
    close(gm(*inputs), mixture(m, *inputs), m["dtype"])


WRONG = {
    "window off by one": lambda a: {**a, "window": a["window"] + 1},
    "not causal": lambda a: {**a, "is_causal": False},
    "scale": lambda a: {**a, "scale": a["scale"] * 1.02},
    "another cap": lambda a: {**a, "softcap": 2.2},
    "mask dropped": lambda a: {**a, "mask": None},
    "keys and values of other heads": lambda a: {**a, "k": a["k"].flip(1), "v": a["v"].flip(1)},
}


@pytest.mark.parametrize("name", ["right", *WRONG])
def test_the_comparison_sees_planted_mistakes(name):
    q, k, v = tensors(kv=2, s=9, t=9)
    i = torch.arange(9)
    mask = torch.where(torch.arange(9) % 4 > 0, 0.0, -2.0)[None, None, None, :]
    x = torch.tanh(q @ repeat_kv(k, 2).transpose(2, 3) / 2 / 2.0) * 2.0 + mask
    x = x.masked_fill((i[None, :] > i[:, None]) | (i[None, :] <= i[:, None] - 4), INF)
    expected = attend(x, repeat_kv(v, 2)).transpose(1, 2)
    arguments = {"q": q, "k": k, "v": v, "mask": mask, "scale": 0.5, "is_causal": True, "window": 4, "softcap": 2.0}
    if name == "right":
        close(attention(**arguments), expected)
        return
    with pytest.raises(AssertionError):
        close(attention(**WRONG[name](arguments)), expected)


# ── sinks ───────────────────────────────────────────────────────────────────────────────────────────────────────


def sink(q, k, v, sinks, *, first=False, drop=True, shift=False, spread=None, late=False):
    x = scores(q, k)
    sinks = sinks.clone() if late else sinks
    column = sinks.view(1, H, 1, 1).expand(B, H, S, 1) if spread is None else spread(sinks)
    x = torch.cat([column, x] if first else [x, column], -1)
    if late:
        sinks.add_(1)
    x = x - x.amax(-1, keepdim=True) if shift else x
    weights = F.softmax(x, -1)
    if not drop:
        return weights @ F.pad(v, (0, 0, 0, 1))
    return (weights[..., 1:] if first else weights[..., :-1]) @ v


@pytest.mark.parametrize("how", [{}, {"first": True}, {"shift": True}, {"shift": True, "first": True}])
def test_sinks_before_and_behind_the_scores(how):
    inputs = (*tensors(), torch.randn(H))
    gm, record, _ = fuse(Fn(lambda *args: sink(*args, **how)), inputs)
    assert len(record.matches) == 1 and options(gm)["sinks"].meta["val"].shape == (H,)
    close(gm(*inputs), sink(*inputs, **how))


def test_sinks_that_the_op_has_not():
    inputs, narrow = (*tensors(), torch.randn(H)), (*tensors(torch.bfloat16), torch.randn(H).bfloat16())
    square = (*tensors(s=H, t=H), torch.randn(H))
    table = [
        (inputs, {"drop": False}, "is not dropped"),
        (
            inputs,
            {"spread": lambda x: x.view(1, H, 1, 1) * torch.arange(S).view(1, 1, S, 1).expand(B, H, S, 1)},
            "one logit",
        ),
        (narrow, {}, "takes the row's maximum away"),
        (square, {"spread": lambda x: x.reshape(1, 1, -1, 1).expand(B, H, H, 1)}, "one logit"),
        (inputs, {"late": True}, "writes to"),
    ]
    for given_inputs, how, reason in table:
        _, record, _ = fuse(Fn(lambda *args, h=how: sink(*args, **h)), given_inputs)
        assert record.matches == () and reason in record.reason, reason
