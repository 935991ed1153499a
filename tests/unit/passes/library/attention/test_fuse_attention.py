"""fuse_attention: every spelling becomes one op, and what stands around it stays right."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attention_cases import (
    INF,
    KV,
    OP,
    SCALE,
    B,
    D,
    Fn,
    H,
    S,
    attend,
    causal,
    close,
    fuse,
    only,
    options,
    repeat_kv,
    tensors,
)
from attention_spellings import (
    NOTHING,
    SPELLINGS,
    bmm,
    einsum_sequence_first,
    plain,
    scale_of_a_full_tensor,
    sdpa_causal,
    with_transpose,
)
from graft.ir.canonical.normal_form import canonicalize
from graft.ir.io.text import graph_text, target_text
from graft.ir.nodes import calls, is_op
from graft.ir.trace import export_graph
from graft.passes.pipeline import run_pipeline
from marks import crossed


@pytest.mark.some(26)
@crossed("spelling", SPELLINGS, [torch.float32, torch.bfloat16], ids=lambda f: getattr(f, "__name__", None))
def test_every_spelling_becomes_one_op(spelling, dtype):
    wanted = dict(SPELLINGS[spelling])
    inputs = tensors(dtype, kv=wanted.pop("kv", H))
    heads = wanted.pop("heads", inputs[1].shape[1])
    gm, record, _ = fuse(Fn(spelling), inputs)
    assert (record.status, len(record.matches), record.near_misses) == ("applied", 1, ())
    given = options(gm)
    for name, value in (NOTHING | wanted).items():
        if value == "tensor":
            assert given[name] is not None
        else:
            exact = 1e-6 if spelling is not scale_of_a_full_tensor else 1e-3  # the tensor is rounded to its dtype
            assert given[name] == (pytest.approx(value, rel=exact) if isinstance(value, float) else value), name
    assert given["k"].meta["val"].shape[1] == heads
    assert not any(is_op(n, torch.ops.aten.softmax.int) for n in calls(gm.graph))
    close(gm(*inputs), spelling(*inputs), dtype)


# ── graphs without attention ────────────────────────────────────────────────────────────────────────────────────


class Router(nn.Module):
    """A mixture of experts as models spell it: softmax, top k, and the weights on the experts' results."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(D, 4, bias=False), nn.Parameter(torch.randn(4, D, D))

    def forward(self, x):
        weights, chosen = torch.topk(F.softmax(self.gate(x), dim=-1, dtype=torch.float32), 2, dim=-1)
        routed = torch.zeros_like(self.gate(x)).scatter(-1, chosen, weights.to(x.dtype))
        experts = torch.bmm(x.expand(4, -1, -1) * routed.t()[..., None], self.up)
        return experts.sum(0)


def test_a_router_is_no_near_miss():
    _, record, _ = fuse(Router(), (torch.randn(5, D),))
    assert record.near_misses == () and "1 softmax, none of which feeds a matmul" in record.reason


def test_reasons_where_there_is_nothing_to_do():
    _, record, _ = fuse(Fn(lambda x: x.exp()), (torch.randn(3),))
    assert record.reason == "the graph has no softmax and no scaled_dot_product_attention"
    _, record, _ = fuse(Fn(lambda q, k, v: torch.ops.graft.attention(q, k, v, None, 1.0)), tensors())
    assert record.reason == "attention is graft::attention already"


# ── what stands around it ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("spelling", [with_transpose, sdpa_causal, bmm, einsum_sequence_first])
def test_transposes_that_cancel_are_gone(spelling):
    gm, record, _ = fuse(Fn(spelling), tensors())
    names = [target_text(n.target) for n in calls(gm.graph)]
    after = names[names.index("graft.attention") + 1 :]
    assert after in ([], ["aten.reshape"])
    assert len(record.matches[0].replaced) >= 2 and "attention_default" in record.matches[0].made


def test_both_layouts_can_be_read():
    def both(q, k, v):
        out = plain(q, k, v)
        return out.transpose(1, 2).contiguous(), out.exp()

    inputs = tensors()
    gm, record, _ = fuse(Fn(both), inputs)
    assert len(record.matches) == 1
    for got, expected in zip(gm(*inputs), both(*inputs), strict=True):
        close(got, expected)


def changed_number(q, k, v):
    c = torch.full((1,), 1.0)
    c[0] = 0.1
    return attend(q @ k.transpose(2, 3) * c, v)


def changed_fill(q, k, v):
    c = torch.full((), INF)
    c.fill_(-1.0)
    return attend(torch.where(causal(S), q @ k.transpose(2, 3), c), v)


def weights_as(*dtypes):
    def fn(q, k, v):
        weights = torch.softmax(q @ k.transpose(2, 3) * SCALE, -1)
        for dtype in dtypes:
            weights = weights.to(dtype)
        return weights @ v

    return fn


def result_written(q, k, v):
    out = plain(q, k, v)
    out.view(B, H, S * D).add_(1)
    return out * 2


def result_strided(q, k, v):
    return plain(q, k, v).as_strided((B, S * H * D), (H * S * D, 1))


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (changed_number, "multiplied by a tensor"),
        (changed_fill, "not a number"),
        (weights_as(torch.int32, torch.float32), "become torch.int32"),
        (weights_as(torch.bfloat16, torch.float32), "become torch.bfloat16"),
        (result_written, "written to in place"),
        (result_strided, "by its strides"),
    ],
)
def test_writes_casts_and_strides_that_the_op_would_lose(fn, reason):
    inputs = tensors()
    gm, record, _ = fuse(Fn(fn), inputs)
    assert record.matches == () and reason in record.reason
    close(gm(*inputs), fn(*inputs))


TRANSPOSES = {
    "twice": (lambda x: x.transpose(1, 2).transpose(2, 1).exp(), 0),
    "twice, as permute": (lambda x: x.permute(0, 2, 1).transpose(-1, -2).exp(), 0),
    "other names": (lambda x: x.mT.swapaxes(1, 2).swapdims(0, 1).transpose(0, 1).exp(), 0),
    "three times": (lambda x: x.mT.mT.mT.exp(), 1),
    "other dims": (lambda x: x.transpose(0, 1).transpose(1, 2).exp(), 2),
}


@pytest.mark.parametrize("name", TRANSPOSES)
def test_transposes_of_transposes(name):
    fn, left = TRANSPOSES[name]
    x = torch.randn(2, 3, 4)
    gm = export_graph(Fn(fn), (x,))
    assert sum(is_op(n, torch.ops.aten.transpose.int) for n in calls(gm.graph)) == left
    assert torch.equal(gm(x), fn(x))
    once = graph_text(gm.graph)
    canonicalize(gm)
    assert graph_text(gm.graph) == once


def test_transposes_around_a_write_keep_who_sees_it():
    def fn(x):
        y = x.clone()
        z = y.transpose(0, 1).transpose(0, 1)
        y.add_(1)
        return z * 2

    x = torch.randn(3, 4)
    assert torch.equal(export_graph(Fn(fn), (x,))(x), fn(x))


class Block(nn.Module):
    """x → q, k, v → attention → output, as in GPT-style models."""

    def __init__(self, kind, bias, kv):
        super().__init__()
        self.kind, self.kv = kind, kv
        self.q, self.k, self.v = (nn.Linear(24, n * D, bias) for n in (H, kv, kv))
        self.o = nn.Linear(H * D, 24)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (
            f(x).view(b, s, n, D).transpose(1, 2) for f, n in ((self.q, H), (self.k, self.kv), (self.v, self.kv))
        )
        k, v = repeat_kv(k, H // self.kv), repeat_kv(v, H // self.kv)
        if self.kind == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = attend((q @ k.transpose(2, 3) / math.sqrt(D)).masked_fill(~causal(s), INF), v)
        return x + self.o(out.transpose(1, 2).contiguous().view(b, s, H * D))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("kind", "bias", "kv"), [("eager", False, KV), ("eager", True, H), ("sdpa", True, KV)])
def test_projections_merge_behind_a_fused_attention(kind, bias, kv, dynamic):
    module = Block(kind, bias, kv).eval()
    x, other = torch.randn(2, 5, 24), torch.randn(3, 9, 24)
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    gm = export_graph(module, (x,), dynamic_shapes=(sizes,) if dynamic else None)
    inputs = (other, x) if dynamic else (x,)
    with torch.no_grad():
        expected = [module(given) for given in inputs]
    report = run_pipeline(gm, only("fuse_attention", "merge_qkv"))
    assert [len(report.transforms[n].matches) for n in ("fuse_attention", "merge_qkv")] == [1, 1]
    assert sum(is_op(n, torch.ops.aten.linear.default) for n in calls(gm.graph)) == 2
    assert (options(gm)["is_causal"], options(gm)["mask"], options(gm)["k"].meta["val"].shape[1]) == (True, None, kv)
    with torch.no_grad():
        for given, wanted in zip(inputs, expected, strict=True):
            close(gm(given), wanted)


def test_new_nodes_carry_value_place_and_maker():
    gm, _, _ = fuse(Block("eager", True, KV).eval(), (torch.randn(2, 5, 24),))
    made = [n for n in calls(gm.graph) if n.meta.get("made_by") == "fuse_attention"]
    assert any(is_op(n, OP) for n in made)
    assert all("val" in n.meta and n.meta.get("stack_trace") for n in made)
