"""What `graft discover` takes for equal: by value, on random chains and on near misses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graft.ir.trace import export_graph
from graft.workbench.discover import discover
from graft.workbench.discover.aten import aten_kernels
from graft.workbench.discover.inductor import inductor_patterns
from graft.workbench.discover.values import read_value, split
from marks import examples

UNARY = (torch.tanh, torch.sigmoid, torch.exp, torch.neg, F.silu, F.relu, torch.abs)
BINARY = (torch.add, torch.mul, torch.sub)


class Chain(nn.Module):
    """A product, then calls drawn at random, each on earlier results."""

    def __init__(self, steps):
        super().__init__()
        self.mix, self.steps = nn.Linear(8, 8), steps

    def forward(self, x):
        values = [self.mix(x), x]
        for op, left, right in self.steps:
            chosen = values[left % len(values)]
            values.append(op(chosen) if op in UNARY else op(chosen, values[right % len(values)]))
        return sum(values[2:])


places = st.integers(0, 20)
steps = st.lists(st.tuples(st.sampled_from(UNARY + BINARY), places, places), min_size=2, max_size=6)


@settings(max_examples=examples(15), deadline=None)
@given(steps)
def test_the_source_of_any_chain_computes_it(drawn):
    gm = export_graph(Chain(drawn).eval(), (torch.randn(3, 8),))
    for candidate in discover(gm).candidates:
        part = candidate.subgraph()
        inputs = [torch.randn(node.meta["val"].shape) for node in part.graph.nodes if node.op == "placeholder"]
        expected, got = part(*inputs), candidate.function()(*inputs)
        for one, other in zip(*((r if isinstance(r, tuple) else (r,)) for r in (expected, got)), strict=True):
            assert torch.equal(one, other)


class Gelu(nn.Module):
    def __init__(self, cubic):
        super().__init__()
        self.cubic = cubic

    def forward(self, x):
        y = x.cumsum(1)  # behind a linear layer it would be a fusion of graft's
        return 0.5 * y * (1 + torch.tanh(0.7978845608028654 * (y + self.cubic * y.pow(3))))


@pytest.mark.parametrize(("cubic", "known"), [(0.044715, True), (0.044714, False)])
def test_a_kernel_counts_only_where_its_values_are_equal(cubic, known):
    (candidate,) = discover(export_graph(Gelu(cubic), (torch.randn(3, 8),))).worthwhile
    assert ("aten::gelu" in [found.symbol for found in candidate.existing]) is known
    wanted = "use_existing_kernel" if known else "needs_triton_fallback"
    assert candidate.recommendation == wanted


@pytest.mark.parametrize(("eps", "offset", "known"), [(1e-5, 0.0, True), (1e-5, 1e-3, False)])
def test_a_norm_is_told_from_one_that_adds_something(eps, offset, known):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8))

        def forward(self, x):
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)) + offset

    (candidate,) = discover(export_graph(Norm(), (torch.randn(3, 8),))).worthwhile
    assert ("aten::rms_norm" in [found.symbol for found in candidate.existing]) is known


def test_every_kernel_and_pattern_names_a_file_that_is_there():
    known = (*aten_kernels(), *inductor_patterns())
    assert len(aten_kernels()) > 20 and len(inductor_patterns()) > 10
    for one in known:
        assert (Path(torch.__file__).parent.parent / one.file).is_file(), one


def test_values_are_read_from_their_text():
    assert split("s44, Max(1, s70), 32") == ["s44", "Max(1, s70)", "32"]
    assert read_value("None", {}) is None
    pair = read_value("(bf16[2, 3]@meta, i64[4])", {})
    assert [t.dtype for t in pair] == [torch.bfloat16, torch.int64] and list(pair[0].shape) == [2, 3]
    assert read_value("f32[]", {}).dim() == 0
