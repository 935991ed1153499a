"""The testing kit on compiled code: graphs after Inductor's passes, kernels, recompilations, round trips."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graft
from graft.testing import (
    assert_no_recompiles,
    assert_same_numbers,
    cache_round_trip,
    generated_kernels,
    post_grad_graph,
)
from graft.testing.generated import read_calls, read_kernels
from processes import run_python
from testing_kit_cases import Gated, X


def test_the_post_grad_graph_with_and_without_grafts_passes():
    module = Gated()
    stock, fused = post_grad_graph(module, X), post_grad_graph(module, X, options=graft.passes_for_inductor())
    assert "aten.exp" in stock.called and not any("graft" in name for name in stock.called)
    assert fused.called.count("graft.swiglu") == 1 and "aten.exp" not in fused.called
    assert "aten.exp" in fused.before[0] and "graft.swiglu" in fused.after[0] and len(fused.graph.nodes)
    assert_same_numbers(fused.result, module(X), roundings=4, wrong=stock.result * 1.001)


def test_graph_breaks_are_told():
    def broken(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    seen = post_grad_graph(broken, X)
    assert len(seen.graphs) == 2 and seen.called == ["aten.sin", "aten.cos"]
    with pytest.raises(AssertionError, match="expected: one graph\nfound:    2 graphs, so the function breaks"):
        seen.graph  # noqa: B018


def test_generated_kernels_and_the_ops_beside_them():
    module = Gated()
    made = generated_kernels(module, X, options=graft.passes_for_inductor())
    assert made.calls.count("torch.ops.graft.swiglu.default") == 1 and not made.kernels
    torch.testing.assert_close(made.result, module(X))
    own = generated_kernels(lambda x: x.sin() * x.cos(), X)
    (kernel,) = own.kernels
    assert kernel.language == "cpp" and kernel.name.startswith("cpp_fused") and "sin" in kernel.source
    assert not own.calls and "async_compile" in own.code[0]


def test_triton_kernels_are_read_too():
    import ast

    tree = ast.parse(
        "triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', '''import triton\\ndef k(): pass''',"
        " device_str='cuda')\nextern_kernels.mm(a, b, out=c)\nd = torch.ops.graft.rope.default(c)\n"
    )
    (kernel,) = read_kernels(tree)
    assert (kernel.name, kernel.language) == ("triton_poi_fused_add_0", "triton") and "def k" in kernel.source
    assert list(read_calls(tree)) == ["extern_kernels.mm", "torch.ops.graft.rope.default"]


def test_recompiles_are_told_with_dynamos_reason():
    def branches(x, n):
        return x * n

    assert_no_recompiles(Gated(), [(X,), (X + 1,), (X.clone(),)])
    assert_no_recompiles(Gated(), [(X,), (X[:, :2].contiguous(),), (X.repeat(2, 3, 1),)], dynamic=True)
    with pytest.raises(
        AssertionError, match=r"call 3 with torch.float32 \[2, 2, 8\] compiled again\n(.|\n)*expected 3, actual 2"
    ):
        assert_no_recompiles(Gated(), [(X,), (X,), (X[:, :2],)])
    with pytest.raises(AssertionError, match="n == 2"):
        assert_no_recompiles(torch.compile(branches, backend="eager"), [(X, 2), (X, 3)])
    assert_no_recompiles(torch.compile(branches, backend="eager"), [(X, 2), (X, 3), (X, 4)], allowed=2)
    with pytest.raises(ValueError, match="leave nothing to check"):
        assert_no_recompiles(Gated(), [(X,)])


def test_recaptures_of_a_compiled_module_are_told():
    class Branch(nn.Module):
        def forward(self, x):
            return x.sin() if x.shape[1] == 3 else x.cos()

    free = ({1: torch.export.Dim.DYNAMIC},)
    compiled = graft.compile(Gated(), (X,), dynamic_shapes=free)
    assert_no_recompiles(compiled, [(X,), (X[:, :2],), (X.repeat(1, 2, 1),)])
    compiled = graft.compile(Branch(), (X[:, :2],), dynamic_shapes=({1: torch.export.Dim.AUTO},))
    with pytest.raises(
        AssertionError, match=r"call 2 with torch.float32 \[2, 3, 8\] compiled again\n.*variant 2 was"
    ):
        assert_no_recompiles(compiled, [(X[:, :2],), (X,)])


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        self.seen.add_(x.sum((0, 1)))
        return F.silu(x) * x + self.seen


@pytest.fixture
def forks(monkeypatch):
    """The second process is forked: it has torch, not graft."""
    forked = SimpleNamespace(run=lambda command, env, **_: run_python(*command[1:], env=env))
    monkeypatch.setattr("graft.testing.round_trip.subprocess", forked)


def test_an_artifact_makes_the_round_trip(forks):
    trip = cache_round_trip(Counter(), (X,))
    assert torch.equal(trip.first, trip.second) and len(trip.seconds) == 2


def test_inductors_cache_makes_the_round_trip():
    trip = cache_round_trip(Gated(), (X,), route="inductor")
    assert trip.hits and not trip.misses
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        pytest.raises(AssertionError, match=r"comes out of Inductor's cache\nfound:    the second time: \{'hit': 0"),
    ):
        cache_round_trip(Gated(), (X,), route="inductor")


def test_cache_artifacts_make_the_round_trip(forks, tmp_path, monkeypatch):
    """torch's and graft's in one file: the fresh process has empty caches, and finds all in it."""
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path))
    trip = cache_round_trip(Gated(), (X,), route="cache artifacts")
    assert trip.hits and not trip.misses and torch.equal(trip.first, trip.second)


def test_a_saved_function_makes_the_round_trip(forks, monkeypatch):
    """A process that loads torch alone finds graft's ops, and Dynamo captures nothing."""
    from graft.testing import round_trip

    trip = cache_round_trip(Gated(), (X,), route="saved function")
    assert torch.equal(trip.first, trip.second)
    assert graft.backend_reports()[-1].transforms["fuse_swiglu"].status == "applied"
    monkeypatch.setattr(round_trip, "SAVED", round_trip.SAVED.replace('["unique_graphs"]', '["unique_graphs"] + 1'))
    with pytest.raises(AssertionError, match="found:    Dynamo captured 1 graphs in the fresh process"):
        cache_round_trip(Gated(), (X,), route="saved function")


def test_a_round_trip_that_changes_the_numbers_is_told(forks, monkeypatch):
    from graft.testing import round_trip

    lying = round_trip.CHILD.replace("(*args), f", "(*args) * 2, f")
    monkeypatch.setattr(round_trip, "CHILD", lying)
    with pytest.raises(AssertionError, match=r"same bits after a round trip \(artifact\)\nfound: .* instead of"):
        cache_round_trip(Gated(), (X,))
    monkeypatch.setattr(round_trip, "CHILD", "raise SystemExit('no such op')")
    with pytest.raises(
        AssertionError, match=r"found:    it ended with 1\n  no such op\nwhat to do: name the modules"
    ):
        cache_round_trip(Gated(), (X,))
