"""Transforms inside of the graphs that torch.cond, while_loop, scan and map call; dumps, diffs and saves of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim

import graft
from graft.base.errors import CaptureError, CaptureRefused
from graft.ir.branches import inner_graphs
from graft.ir.io.serial import graph_from_json, graph_to_json
from graft.ir.io.text import graph_text
from marks import examples, short


def norm(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(8), requires_grad=False)


class Cond(Weighted):
    def forward(self, x):
        return norm(torch.cond(x.sum() > 0, lambda x: norm(x, self.w), lambda x: x * 2, (x,)), self.w)


class Nested(Weighted):
    def forward(self, x):
        def inner(x):
            return torch.cond(x.max() > 1, lambda x: norm(x, self.w), lambda x: x + 1, (x,))

        return torch.cond(x.sum() > 0, inner, lambda x: x * 2, (x,))


class Loop(Weighted):
    def forward(self, x):
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, norm(x * 2, self.w)), (torch.tensor(0), x))


class Scan(Weighted):
    def forward(self, x):
        return scan(lambda c, x: (c * x, norm(c * x, self.w)), torch.ones(8), x, dim=0)


class Map(Weighted):
    def forward(self, x):
        return map_over(lambda x: norm(x, self.w), x.unsqueeze(1))


PROGRAMS = {Cond: 2, Nested: 1, Loop: 1, Scan: 1, Map: 1}


@pytest.mark.some(2)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("sizes", [None, {"x": {0: Dim.DYNAMIC}}], ids=["static", "dynamic"])
def test_fusions_enter_the_graphs_and_a_saved_module_has_them(program, sizes, tmp_path):
    module, x = program(), torch.randn(4, 8)
    compiled = graft.compile(module, (x,), dynamic_shapes=sizes)
    record = compiled.report.transforms["fuse_rms_norm"]
    assert len(record.matches) == PROGRAMS[program]
    names = {node.name for inner in inner_graphs(compiled.graph_module).values() for node in inner.graph.nodes}
    inside = [match for match in record.matches if set(match.made) <= names]
    assert len(inside) == 1 and compiled.report.kernels["graft::rms_norm"].ran[0].sites == PROGRAMS[program]
    compiled.save(tmp_path / "saved")
    loaded = graft.load(tmp_path / "saved")
    assert graph_text(loaded.graph_module.graph) == graph_text(compiled.graph_module.graph)
    for value in (x, -x.abs(), x.abs() * 3, *((torch.randn(7, 8),) if sizes else ())):
        expected = module(value)
        torch.testing.assert_close(compiled(value), expected)
        torch.testing.assert_close(loaded(value), expected)


class Writing(nn.Module):
    """A branch writes to a buffer, with or without a result that somebody wants."""

    def __init__(self, wanted):
        super().__init__()
        self.wanted = wanted
        self.register_buffer("b", torch.zeros(3))

    def forward(self, x):
        def count(x):
            self.b.add_(1)
            return x + 1

        before = (self.b + 1) * 2
        result = torch.cond(x.sum() > 0, count, lambda x: x - 1, (x,))
        return (before, (self.b + 1) * 3, *((result,) if self.wanted else ()))


@pytest.mark.parametrize("wanted", [True, False])
def test_a_branch_that_writes_is_refused(wanted):
    """Reads around it would be merged, and a call whose result nobody wants dropped."""
    with pytest.raises(CaptureError, match=r"(graph_0 writes to b_b|branch or body writes).*return the new value"):
        graft.compile(Writing(wanted), (torch.ones(3),))


@pytest.mark.exhaustive  # the short run: other branches through Inductor, below
@pytest.mark.parametrize("wanted", [True, False])
def test_a_branch_that_writes_is_left_to_inductor(wanted):
    x = torch.ones(3)
    backend, module, eager = graft.Backend(), Writing(wanted), Writing(wanted)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="writes to"):
            found = torch.compile(module, backend=backend)(x)
        expected = eager(x)
    for one, other in zip((*found, module.b), (*expected, eager.b), strict=True):
        assert torch.equal(one, other)
    assert any("writes to" in note for note in backend.reports[0].notes)


def test_a_saved_branch_has_its_own_constants(tmp_path):
    class Constant(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x + torch.tensor([1.0, 2.0]), lambda x: x - 1, (x,))

    module, x = Constant(), torch.ones(2)
    graft.compile(module, (x,)).save(tmp_path / "saved")
    loaded = graft.load(tmp_path / "saved")
    for value in (x, -x):
        assert torch.equal(loaded(value), module(value))


@pytest.mark.parametrize("program", short([Cond, Nested, Loop, Scan, Map], Map))
def test_inductor_and_torch_compile_keep_them(program):
    module, x = program(), torch.randn(4, 8)
    compiled = graft.compile(module, (x,), backend="inductor")
    backend = graft.Backend()
    jitted = torch.compile(module, backend=backend)
    for value in (x, -x.abs(), x.abs() * 3):
        expected = module(value)
        torch.testing.assert_close(compiled(value), expected)
        torch.testing.assert_close(jitted(value), expected)
    assert [len(r.transforms["fuse_rms_norm"].matches) for r in backend.reports] == [PROGRAMS[program]]
    assert len(compiled.report.transforms["fuse_rms_norm"].matches) == PROGRAMS[program]


def test_a_reason_names_the_graph_that_it_is_about():
    def program(x, w):
        return torch.cond(x.sum() > 0, lambda x, w: norm(x, w * 2), lambda x, w: x * w, (x, w))

    record = graft.compile(program, (torch.randn(4, 8), torch.rand(8))).report.transforms["fuse_rms_norm"]
    assert record.status == "no_match" and "; in true_graph_0: " in record.reason
    assert "is computed in the graph, it is not a parameter" in record.reason
    assert {miss.stopped_at for miss in record.near_misses} == {"true_graph_0_mul_2"}


def test_every_match_inside_is_checked_numerically():
    compiled = graft.compile(Cond(), (torch.randn(4, 8),), config={"verify": "matches"})
    checks = [match.numeric_check for match in compiled.report.transforms["fuse_rms_norm"].matches]
    assert len(checks) == 2 and all(check is not None for check in checks)


def test_dumps_and_diffs_hold_the_graphs(tmp_path):
    compiled = graft.compile(Cond(), (torch.randn(4, 8),), dump_dir=tmp_path)
    before, after = (graft.load_dump(next(tmp_path.glob(name))) for name in ("000_*.json", "*fuse_rms_norm.json"))
    assert "graft.rms_norm(%true_graph_0_" in next(tmp_path.glob("*fuse_rms_norm.txt")).read_text()
    changes = graft.diff_graphs(before.graph, after.graph).changes
    added = [change.after.name for change in changes if change.kind == "added"]
    assert sorted(name.startswith("true_graph_0_") for name in added) == [False, True]
    again = graph_from_json(graph_to_json(compiled.graph_module))
    assert graph_text(again.graph) == graph_text(compiled.graph_module.graph)


def test_a_cuda_graph_says_why_not():
    with pytest.raises(CaptureRefused, match="is the higher-order op cond"):
        graft.compile(Cond(), (torch.randn(4, 8),), backend="cuda_graph")


@settings(max_examples=examples(12))
@given(depth=st.integers(1, 3), norms=st.lists(st.booleans(), min_size=3, max_size=3), sign=st.sampled_from([1, -1]))
def test_any_nesting_computes_what_eager_computes(depth, norms, sign):
    class Deep(Weighted):
        def branch(self, level):
            def taken(x):
                y = norm(x, self.w) if norms[level - 1] else x.sin()
                if level == depth:
                    return y
                return torch.cond(y.sum() > level, self.branch(level + 1), lambda x: x * level, (y,))

            return taken

        def forward(self, x):
            return torch.cond(x.sum() > 0, self.branch(1), lambda x: norm(x, self.w), (x,)) + 1

    module, x = Deep(), torch.randn(3, 8).abs() * sign
    compiled = graft.compile(module, (x,))
    assert len(compiled.report.transforms["fuse_rms_norm"].matches) == 1 + sum(norms[:depth])
    for value in (x, -x, x * 5):
        torch.testing.assert_close(compiled(value), module(value))
