"""merge_gemms: linear layers that read one input become one, whoever they are; and what stays as it is, and why."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, is_op
from graft.ir.trace import export_graph
from graft.ops.cases import tolerance
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry, load_all
from marks import examples

load_all()
D = 8
MERGES = ("merge_qkv", "merge_gate_up", "merge_gemms")


def merge(module, *args, names=("merge_gemms",), verify="matches"):
    gm = export_graph(module.eval().requires_grad_(False), args)
    before = graph_text(gm.graph)
    known = {n: {"enabled": n in names} for n in TransformRegistry.names()}
    report = run_pipeline(gm, load_config({"verify": verify, "transforms": known}))
    return gm, report.transforms["merge_gemms"], before


def linears(gm):
    return [n for n in calls(gm.graph) if is_op(n, torch.ops.aten.linear.default)]


class Heads(nn.Module):
    """Layers of any width, with and without bias, over one input; what they give is squared and summed up."""

    def __init__(self, widths, biases, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.heads = nn.ModuleList([nn.Linear(D, n, bias) for n, bias in zip(widths, biases, strict=True)])

    def forward(self, x):
        x = x.tanh()
        return torch.cat([head(x) * 2 for head in self.heads], -1)


def storages(parameters):
    return {p.untyped_storage().data_ptr() for p in parameters}


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=2, max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 4),
)
@settings(max_examples=examples(6), deadline=None)
def test_any_number_of_layers_with_and_without_bias_become_one(layers, dtype, rows):
    widths, biases = zip(*layers, strict=True)
    module, x = Heads(widths, biases).to(dtype), torch.randn(2, rows, D).to(dtype)
    exact = module.double()(x.double())
    module = module.to(dtype)
    expected, size = module(x), sum(p.numel() for p in module.parameters())
    gm, record, _ = merge(module, x)
    assert len(record.matches) == 1 and not record.near_misses
    assert len(linears(gm)) == 1
    bound = 8 * tolerance(dtype, D)
    torch.testing.assert_close(gm(x).double(), exact, rtol=bound, atol=bound)
    torch.testing.assert_close(gm(x), expected, rtol=bound, atol=bound)
    if max(widths) > 1 or len(layers) > 2:  # pieces in another order are found out
        wrong = torch.cat([head(x.tanh()) * 2 for head in reversed(module.heads)], -1)
        assert torch.equal(wrong, expected) or not torch.allclose(gm(x), wrong, rtol=bound, atol=bound)
    weights = [head.weight for head in module.heads]
    assert len(storages(weights)) == 1
    assert weights[0].untyped_storage().nbytes() == sum(w.numel() for w in weights) * dtype.itemsize
    assert size == sum(p.numel() for p in module.parameters())


def test_the_pieces_are_views_and_a_second_graph_shares_the_memory():
    module, x = Heads((3, 4, 5), (True, False, True)), torch.randn(2, D)
    expected = module(x)
    first, _, _ = merge(module, x)
    before = storages(module.parameters())
    second, record, _ = merge(module, x)
    assert len(record.matches) == 1
    assert storages(module.parameters()) == before == storages(first.parameters()) == storages(second.parameters())
    assert [n.target for n in calls(second.graph)].count(torch.ops.aten.slice.Tensor) == 3
    torch.testing.assert_close(first(x), expected)
    module.heads[0].weight.mul_(2)  # what is written to a weight of the module is seen by both
    torch.testing.assert_close(first(x), module(x))
    torch.testing.assert_close(second(x), module(x))


class Decoder(nn.Module):
    """Attention, a gated MLP and two gates over one normed input: a parallel block."""

    def __init__(self, d=16):
        super().__init__()
        for name in ("q", "k", "v", "o", "gate", "up", "down", "beta", "decay"):
            setattr(self, name, nn.Linear(d, d, bias=name == "decay"))

    def forward(self, x):
        h = x.tanh()
        q, k, v = (layer(h).view(1, -1, 2, 8).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        mixed = self.o(attended) * torch.sigmoid(self.beta(h)) + F.softplus(self.decay(h))
        return x + mixed + self.down(F.silu(self.gate(h)) * self.up(h))


def test_what_the_named_merges_leave_is_merged_after_them():
    module, x = Decoder(), torch.randn(1, 5, 16)
    expected = module(x)
    gm, record, _ = merge(module, x, names=("fuse_attention", "fuse_swiglu", *MERGES))
    assert len(record.matches) == 1 and len(linears(gm)) == 5  # qkv, gate and up, the two gates; o and down
    reasons = sorted(miss.reason.partition(" was ")[2] for miss in record.near_misses)
    assert reasons == ["merged by merge_gate_up already", "merged by merge_qkv already"]
    torch.testing.assert_close(gm(x), expected)
    alone, record, _ = merge(Decoder(), x)
    assert len(record.matches) == 1 and len(linears(alone)) == 3


class Pair(nn.Module):
    """Two layers that could be merged, and something in the way."""

    def __init__(self, way):
        super().__init__()
        self.a, self.b, self.way = nn.Linear(D, D), nn.Linear(D, D, bias=False), way
        if way == "tied":
            self.b.weight = self.a.weight
        if way == "tied bias":
            self.b.bias = self.a.bias
        if way == "dtype":
            self.b.double()
        if way == "memory":
            both = torch.randn(2 * D, D)
            self.a.weight, self.c = nn.Parameter(both[:D]), nn.Parameter(both[D:])
        if way == "buffer":
            del self.b.weight
            self.b.register_buffer("weight", torch.randn(D, D))

    def forward(self, x):
        x = x * 2
        a = self.a(x)
        if self.way == "write":
            x[0].add_(1)
        if self.way == "view":
            flat = a.view(-1)
            flat.mul_(2)
        if self.way == "computed":
            return a.sin() + F.linear(x, self.b.weight.exp()).cos()
        if self.way == "another input":
            return a.sin() + self.b(x.exp()).cos()
        b = self.b(x.double()).float() if self.way == "dtype" else self.b(x)
        if self.way == "written":
            a.relu_()
        if self.way == "memory":
            b = b @ self.c
        return (a, b.sin()) if self.way == "returned" else a.sin() + b.cos()


REFUSED = {
    "tied": "weight .* is tied",
    "tied bias": "bias .* is tied",
    "dtype": "no two linear layers read one input",
    "another input": "no two linear layers read one input",
    "memory": "shares its memory with c",
    "buffer": "is not a parameter",
    "computed": "is not a parameter",
    "write": "is written in place by %add_.* between",
    "written": "is written in place by %relu_",
    "view": "is written in place by %mul_",
    "returned": "%linear.* is returned",
}


@pytest.mark.parametrize("way", REFUSED)
def test_what_must_stay_stays_byte_for_byte_with_the_reason(way):
    module, x = Pair(way), torch.randn(3, D)
    gm, record, before = merge(module, x)
    assert record.status == "no_match" and re.search(REFUSED[way], record.reason), record.reason
    assert graph_text(gm.graph) == before
    torch.testing.assert_close(gm(x), module(x))


def test_without_anything_in_the_way_the_pair_is_merged():
    module, x = Pair(""), torch.randn(3, D)
    gm, record, _ = merge(module, x)
    assert len(record.matches) == 1
    torch.testing.assert_close(gm(x), module(x))


def test_one_that_cannot_stays_and_the_others_are_merged():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(D, D) for _ in range(3))

        def forward(self, x):
            return self.a(x), self.b(x).sin() + self.c(x).cos()

    module, x = Three(), torch.randn(3, D)
    expected = module(x)
    gm, record, _ = merge(module, x)
    assert len(record.matches) == 1 and len(linears(gm)) == 2
    assert [miss.reason.partition(") ")[2] for miss in record.near_misses] == [
        "is returned, and would be a view of a wider tensor"
    ]
    torch.testing.assert_close(gm(x), expected)
