"""Norms as vLLM spells them: sums in float32, rounded before the norm or after it, and gated rows."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, is_op, options_of
from graft.ir.trace import export_graph
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry, load_all
from graft.testing.fusion import AsModule
from marks import examples
from vllm_cases import Block, D, Gated, GatedAfter, RMSNorm, RoundedFirst, T

load_all()
OPS = torch.ops.graft
NAMES = ("fuse_rms_norm", "fuse_add_rms_norm")
ENABLED = {n: {"enabled": n in NAMES} for n in TransformRegistry.names()}
CONFIG = load_config({"verify": "matches", "transforms": ENABLED})
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def fuse(module, *args):
    gm = export_graph(module.eval(), args)
    before = graph_text(gm.graph)
    return gm, run_pipeline(gm, CONFIG).transforms, before


def data(dtype, *shape, seed=0):
    return torch.randn(shape or (T, D), generator=torch.Generator().manual_seed(seed)).to(dtype)


def found(gm, op):
    return [options_of(node) for node in calls(gm.graph) if is_op(node, op)]


class Promoted(RMSNorm):
    """The residual becomes float32 by the sum."""

    def forward(self, x, residual=None):
        if residual is None:
            return super().forward(x)
        dtype, x = x.dtype, x.to(torch.float32)
        x = x + residual
        residual = x.to(dtype)
        x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return x.to(dtype) * self.weight, residual


class Gemma(RMSNorm):
    """The weight is stored less one, and multiplied in float32."""

    def forward(self, x, residual=None):
        dtype, x = x.dtype, x.float()
        if residual is not None:
            x = x + residual.float()
            residual = x.to(dtype)
        x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        x = (x * (1.0 + self.weight.float())).to(dtype)
        return x if residual is None else (x, residual)


WIDE, ROUNDED = {"cast": RMSNorm, "promoted": Promoted, "gemma": Gemma}, {"rounded first": RoundedFirst}


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", [*WIDE, *ROUNDED])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_norm_of_a_block_fuses(kind, dtype):
    """The plain first norm too, whose cast the first sum reads as well. Bit for bit what eager gives."""
    module = Block(DTYPES[dtype], {**WIDE, **ROUNDED}[kind])
    gm, records, _ = fuse(module, data(DTYPES[dtype]))
    assert [len(records[name].matches) for name in NAMES] == [3, 2], records["fuse_rms_norm"].near_misses
    sums = found(gm, OPS.add_rms_norm.default)
    assert len(sums) == 2 and len(found(gm, OPS.rms_norm.default)) == 1
    assert all(s["wide"] == (kind in WIDE and dtype != "float32") for s in sums)
    x = data(DTYPES[dtype], seed=5)
    assert torch.equal(gm(x), module(x))
    exact = copy.deepcopy(module).double()(x.double())
    limit = 1.2 * (module(x).double() - exact).abs().max() + 1e-6
    assert (gm(x).double() - exact).abs().max() <= limit < (1.1 * gm(x).double() - exact).abs().max()


@pytest.mark.parametrize("kind", WIDE)
def test_float32_sums_are_plain_beside_casts_of_other_things(kind):
    """Patterns with casts are tried there, and theirs change nothing: such a sum is not `wide`."""

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block(torch.float32, WIDE[kind])

        def forward(self, x, count):
            return self.block(x) * count.to(torch.float32)

    gm, records, _ = fuse(Counted(), data(torch.float32), torch.tensor(3))
    assert [len(records[name].matches) for name in NAMES] == [3, 2] and not records["fuse_add_rms_norm"].near_misses
    assert not any(s["wide"] for s in found(gm, OPS.add_rms_norm.default))


def test_rounding_first_is_another_number():
    """What `wide` is for: the two spellings differ in bfloat16."""
    one, two = Block(torch.bfloat16), Block(torch.bfloat16, RoundedFirst)
    two.load_state_dict(one.state_dict())
    x = data(torch.bfloat16, 64, D)
    assert not torch.equal(one(x), two(x))


@pytest.mark.parametrize("returned", [False, True])
def test_the_rounded_sum_may_have_readers_or_none(returned):
    norm = RMSNorm(D, torch.bfloat16)

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm

        def forward(self, x, residual):
            normed, total = self.norm(x, residual)
            return (normed, total) if returned else normed

    args = data(torch.bfloat16), data(torch.bfloat16, seed=1)
    gm, records, _ = fuse(Last(), *args)
    assert len(records["fuse_add_rms_norm"].matches) == 1
    got, wanted = gm(*args), Last()(*args)
    assert all(
        torch.equal(a, b) for a, b in zip(got if returned else [got], wanted if returned else [wanted], strict=True)
    )


@pytest.mark.parametrize("kind", [Gated, GatedAfter])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_norms_fuse(kind, dtype):
    module, args = kind(D, DTYPES[dtype]), (data(DTYPES[dtype]), data(DTYPES[dtype], seed=1))
    gm, records, _ = fuse(module, *args)
    assert len(records["fuse_rms_norm"].matches) == 1
    (norm,) = found(gm, OPS.rms_norm.default)
    assert norm["dtype"] == (DTYPES[dtype] if kind is Gated and dtype != "float32" else None)
    assert torch.equal(gm(*args), module(*args))


# ── what must not fuse ──────────────────────────────────────────────────────────────────────────────────────────


def wide_sum_read(x, r, w):
    total = x.float() + r.float()
    h = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
    return h.to(x.dtype) * w, total


def row_read(x, r, w):
    total = x.float() + r.float()
    h = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
    return h.to(x.dtype) * w, h


def other_dim(x, r, w):
    total = x.float() + r.float()
    h = total * torch.rsqrt(total.pow(2).mean(0, keepdim=True) + 1e-6)
    return h.to(x.dtype) * w, total.to(x.dtype)


def rounded_elsewhere(x, r, w):
    """To float16 between: no op says that."""
    total = x.float() + r.float()
    h = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
    return h.to(torch.float16) * w, total.to(x.dtype)


def float_residual(x, r, w):
    """The stream of residuals stays float32, as in vLLM's Gemma in float16."""
    total = x.float() + r.float() * 1.5
    h = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
    return h.to(x.dtype) * w, total


NEGATIVES = {
    "the float32 sum is read": (wide_sum_read, [1, 0], "second reader"),
    "the row is read": (row_read, [0, 0], "second reader"),
    "another dim": (other_dim, [0, 0], ""),
    "another dtype between": (rounded_elsewhere, [0, 0], ""),
    "a float32 residual": (float_residual, [1, 0], ""),
}


class Weighted(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(data(torch.bfloat16, D, seed=2))

    def forward(self, x, residual):
        return self.function(x, residual, self.weight)


@pytest.mark.parametrize("name", NEGATIVES)
def test_what_the_ops_cannot_say_stays(name):
    function, counts, reason = NEGATIVES[name]
    module, args = Weighted(function), (data(torch.bfloat16), data(torch.bfloat16, seed=1))
    gm, records, before = fuse(module, *args)
    assert [len(records[n].matches) for n in NAMES] == counts
    last = records[NAMES[counts.index(0)]]
    assert last.reason and reason in last.reason
    assert any(counts) or graph_text(gm.graph) == before
    assert all(torch.equal(a, b) for a, b in zip(gm(*args), module(*args), strict=True))


def test_a_broadcast_residual_stays():
    norm = RMSNorm(D, torch.bfloat16)
    gm, records, _ = fuse(norm, data(torch.bfloat16), data(torch.bfloat16, 1, D, seed=1))
    assert not records["fuse_add_rms_norm"].matches and "differ in shape" in records["fuse_add_rms_norm"].reason
    assert found(gm, OPS.add_rms_norm.default) == []


def test_a_computed_weight_of_a_gated_norm_is_named():
    def gated(x, gate, w):
        h = x.float() * F.silu(gate.float())
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (w * 2) * h.to(x.dtype)

    _, records, _ = fuse(AsModule(gated), *(data(torch.bfloat16), data(torch.bfloat16)), data(torch.bfloat16, D))
    assert "is computed in the graph, it is not a parameter" in records["fuse_rms_norm"].reason


@settings(max_examples=examples(8), deadline=None)
@given(
    cast_x=st.booleans(),
    cast_residual=st.booleans(),
    round_first=st.booleans(),
    ending=st.sampled_from(["llama", "weight first", "gemma"]),
    read=st.sampled_from(["nothing", "rounded", "wide"]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
)
def test_any_residual_sum_keeps_its_bits(cast_x, cast_residual, round_first, ending, read, dtype):
    """However the sum is made, rounded, normed and read: whatever fuses gives eager's bits."""

    def function(x, residual, w):
        x, kind = x.float() if cast_x else x, x.dtype
        total = x + (residual.float() if cast_residual else residual)
        total = total.to(kind) if round_first else total
        h = total.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        ends = {"llama": lambda: h.to(kind) * w, "weight first": lambda: (h * w.float()).to(kind)}
        y = ends[ending]() if ending in ends else (h * (1.0 + w.float())).to(kind)
        return {"nothing": (y,), "rounded": (y, total.to(kind)), "wide": (y, total.float())}[read]

    module = Weighted(function).to(dtype)
    args = data(dtype), data(dtype, seed=1)
    gm, records, _ = fuse(module, *args)
    assert len(records["fuse_rms_norm"].matches) == 1, records["fuse_rms_norm"].reason
    assert all(torch.equal(a, b) for a, b in zip(gm(*args), module(*args), strict=True))
