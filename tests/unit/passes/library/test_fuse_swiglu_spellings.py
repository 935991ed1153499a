"""Gated MLPs in the spellings that models use, and the merging of their projections."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, is_op
from graft.ir.trace import export_graph
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry, load_all
from graft.testing import assert_fuses, assert_not_fuses, assert_same_numbers
from marks import crossed

load_all()
NAMES = ("fuse_swiglu", "merge_gate_up", "merge_qkv")
CONFIG = load_config({"transforms": {n: {"enabled": n in NAMES} for n in TransformRegistry.names()}})
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
D, WIDE = 8, 12
SWIGLU, LINEAR = torch.ops.graft.swiglu.default, torch.ops.aten.linear.default


def fuse(module, *args):
    gm = export_graph(module, args)
    before = graph_text(gm.graph)
    return before, gm, run_pipeline(gm, CONFIG).transforms


def data(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Merged(nn.Module):
    """One projection to gate and up, taken apart by `halves`."""

    def __init__(self, halves):
        super().__init__()
        torch.manual_seed(0)
        self.gate_up, self.halves = nn.Linear(D, 2 * WIDE, bias=False), halves

    def forward(self, x):
        gate, up = self.halves(self.gate_up(x))
        return F.silu(gate) * up


HALVES = {
    "chunk": lambda h: h.chunk(2, -1),
    "split": lambda h: h.split(WIDE, -1),
    "split sizes": lambda h: torch.split(h, [WIDE, WIDE], dim=-1),
    "slices": lambda h: (h[..., :WIDE], h[..., WIDE:]),
    "gate in the second half": lambda h: h.chunk(2, -1)[::-1],
    "unflatten and unbind": lambda h: h.unflatten(-1, (2, -1)).unbind(-2),
    "interleaved": lambda h: (h[..., ::2], h[..., 1::2]),
}


@pytest.mark.parametrize("name", HALVES)
def test_halves_of_a_merged_projection_fuse(name):
    module, x = Merged(HALVES[name]), data(2, 3, D)
    _, gm, report = fuse(module, x)
    assert len(report["fuse_swiglu"].matches) == 1, report["fuse_swiglu"].reason
    assert "come from one linear layer already" in report["merge_gate_up"].reason
    assert torch.equal(gm(x), module(x))


EXACT = {
    "silu": lambda g, u: F.silu(g) * u,
    "up first": lambda g, u: u * F.silu(g),
    "gelu": lambda g, u: F.gelu(g) * u,
    "gelu tanh": lambda g, u: F.gelu(g, approximate="tanh") * u,
    "relu": lambda g, u: F.relu(g) * u,
    "relu squared": lambda g, u: F.relu(g).square() * u,
    "relu to the power of 2": lambda g, u: u * torch.pow(F.relu(g), 2),
    "silu in float32": lambda g, u: (F.silu(g.float()) * u.float()).to(g.dtype),
    "gelu in float32": lambda g, u: (F.gelu(g.float()) * u.float()).to(g.dtype),
    "gelu tanh in float32": lambda g, u: (F.gelu(g.float(), approximate="tanh") * u.float()).to(g.dtype),
}
ROUNDED = {
    "silu from float32": lambda g, u: F.silu(g.float()).to(g.dtype) * u,
    "gelu from float32": lambda g, u: F.gelu(g.float()).to(g.dtype) * u,
    "gelu tanh from float32": lambda g, u: F.gelu(g.float(), approximate="tanh").to(g.dtype) * u,
    "x * sigmoid(x)": lambda g, u: g * torch.sigmoid(g) * u,
    "up * (sigmoid(x) * x)": lambda g, u: u * (g.sigmoid() * g),
}
BY_HAND = {
    "gelu tanh": lambda g, u: (
        0.5 * g * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (g + 0.044715 * torch.pow(g, 3.0)))) * u
    ),
    "gelu erf, division": lambda g, u: g * 0.5 * (1.0 + torch.erf(g / math.sqrt(2.0))) * u,
    "gelu erf, product": lambda g, u: u * (0.5 * g * (torch.erf(g * math.sqrt(0.5)) + 1)),
}


@crossed("name", EXACT, DTYPES)
def test_gated_activation_fuses_to_the_same_bits(name, dtype):
    function, args = EXACT[name], tuple(data(2, 3, 33, dtype=DTYPES[dtype], seed=s) for s in (0, 1))
    fused = assert_fuses(function, args, "fuse_swiglu", count=1, verify="structure")
    assert fused.called == ["graft.swiglu"] and not fused.record.near_misses
    assert_same_numbers(fused(*args), function(*args))


def wrong_by(result, roundings):
    """What the tolerance has to reject."""
    return result * (1 + 8 * roundings * torch.finfo(result.dtype).eps)


@crossed("name", ROUNDED, DTYPES)
def test_gated_activation_by_hand_or_from_float32_fuses_to_a_rounding(name, dtype):
    function, args = ROUNDED[name], tuple(data(2, 3, 33, dtype=DTYPES[dtype], seed=s) for s in (0, 1))
    fused = assert_fuses(function, args, "fuse_swiglu", count=1, verify="structure")
    assert fused.called == ["graft.swiglu"]
    wanted = function(*args)
    assert_same_numbers(fused(*args), wanted, roundings=2, wrong=wrong_by(wanted, 2))


@pytest.mark.parametrize("name", BY_HAND)
def test_gelu_by_hand_fuses_in_float32_alone(name):
    function, args = BY_HAND[name], tuple(data(2, 3, 33, seed=s) for s in (0, 1))
    fused, wanted = assert_fuses(function, args, "fuse_swiglu", count=1), function(*args)
    assert_same_numbers(fused(*args), wanted, roundings=8, wrong=wrong_by(wanted, 8))
    narrow = tuple(a.bfloat16() for a in args)
    assert_not_fuses(function, narrow, "fuse_swiglu", reason="rounds after every step")


def silu_twice(g, u):
    a = F.silu(g)
    return a * u, a.sin()


NEGATIVES = {
    "quick_gelu": (lambda g, u: g * torch.sigmoid(1.702 * g) * u, "is quick_gelu"),
    "relu cubed": (lambda g, u: F.relu(g).pow(3) * u, "expected the value 2, found 3"),
    "other constants": (
        lambda g, u: 0.5 * g * (1 + torch.tanh(0.79788456 * (g + 0.044715 * g**3))) * u,
        "expected the value 0.7978845608028654, found 0.79788456",
    ),
    "second reader": (silu_twice, "has a second reader"),
    "activation returned": (lambda g, u: (F.silu(g) * u, F.silu(g)), "has a second reader"),
    "dropout in training": (lambda g, u: F.dropout(F.silu(g), 0.5, True) * u, "is aten.dropout"),
    "broadcast up": (lambda g, u: F.silu(g) * u[0, 0], "one is broadcast"),
    "broadcast gate": (lambda g, u: F.silu(g[:1]) * u, "one is broadcast"),
    "float32 gate": (lambda g, u: F.silu(g) * u.half(), "gate is torch.float32 and up is torch.float16"),
}


@pytest.mark.parametrize("name", NEGATIVES)
def test_what_is_no_gated_activation_is_left_alone(name):
    function, reason = NEGATIVES[name]
    left = assert_not_fuses(function, (data(2, 3, D), data(2, 3, D, seed=1)), "fuse_swiglu", reason=reason)
    assert left.record.near_misses and reason in left.record.reason  # it is the nearest miss that says so


# ── merging ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Attention(nn.Module):
    """Grouped heads: query, key and value differ in size."""

    def __init__(self, bias=(False,) * 3, dtypes=(torch.float32,) * 3, tie=False, other_input=False, one_bias=False):
        super().__init__()
        torch.manual_seed(0)
        sizes = (4 * D, 2 * D, 2 * D)
        self.q, self.k, self.v = (nn.Linear(D, s, b).to(t) for s, b, t in zip(sizes, bias, dtypes, strict=True))
        self.other_input, self.tie = other_input, tie
        if one_bias:
            self.v.bias = self.k.bias

    def forward(self, x):
        b, s, _ = x.shape
        y = x.sin() if self.other_input else x
        parts = (lin(z.to(lin.weight.dtype)).float() for lin, z in ((self.q, x), (self.k, x), (self.v, y)))
        q, k, v = (p.view(b, s, -1, D).transpose(1, 2) for p in parts)
        out = torch.ops.graft.attention(q, k, v, None, 0.5, True)
        return (out, F.linear(x.sin(), self.k.weight)) if self.tie else out


@pytest.mark.parametrize("bias", [(False,) * 3, (True,) * 3, (True, False, True)], ids=["none", "all", "some"])
def test_query_key_and_value_of_unequal_sizes_merge(bias):
    module, x = Attention(bias), data(2, 3, D)
    expected = module(x)
    _, gm, report = fuse(module, x)
    assert len(report["merge_qkv"].matches) == 1, report["merge_qkv"].reason
    assert sum(is_op(n, LINEAR) for n in calls(gm.graph)) == 1
    torch.testing.assert_close(gm(x), expected)
    weights = [module.q.weight, module.k.weight, module.v.weight]
    assert len({w.untyped_storage().data_ptr() for w in weights}) == 1
    assert weights[0].untyped_storage().nbytes() == 4 * sum(w.numel() for w in weights)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bias": (False, True, True), "one_bias": True}, "the bias v.bias is tied"),
        ({"tie": True}, "is tied"),
        ({"other_input": True}, "read different inputs"),
        ({"dtypes": (torch.float32, torch.bfloat16, torch.float32)}, "do not all come from linear layers"),
    ],
)
def test_merging_of_query_key_and_value_is_refused(options, reason):
    module, x = Attention(**options), data(2, 3, D)
    expected = module(x)
    before, gm, report = fuse(module, x)
    record = report["merge_qkv"]
    assert not record.matches and reason in record.reason, record.reason
    assert graph_text(gm.graph) == before
    torch.testing.assert_close(gm(x), expected, rtol=0, atol=0)


class Gated(nn.Module):
    """The gate's weight is bfloat16 and widened in the graph."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(D, WIDE, False).to(torch.bfloat16), nn.Linear(D, WIDE, False)

    def forward(self, x):
        return F.silu(F.linear(x, self.gate.weight.to(x.dtype))) * self.up(x)


def test_weights_of_different_dtypes_stay_apart():
    module, x = Gated(), data(2, 3, D)
    _, gm, report = fuse(module, x)
    record = report["merge_gate_up"]
    assert not record.matches and "is not a parameter" in record.reason, record.reason
    assert torch.equal(gm(x), module(x))
