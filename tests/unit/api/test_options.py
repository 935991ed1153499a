"""mode, options, decompositions and fullgraph of graft.compile; passes of the caller's beside graft's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._decomp import get_decompositions
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

import graft
from graft.backends import InductorSettings
from graft.backends.inductor import ChainedPass, inductor_patches, reset_compiler
from graft.base.errors import ArtifactError, UsageError
from graft.memory.inductor_fix.functionalization import VERSION
from inductor_cases import compilations

aten = torch.ops.aten


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        return nn.functional.silu(self.gate(x)) * self.up(x)


pytestmark = pytest.mark.usefixtures("compiled_anew")


def test_patterns_follow_the_callers_decompositions():
    module, x = Gated(), torch.randn(4, 8)
    table = get_decompositions([aten.silu.default])
    whole = graft.compile(module, (x,))
    off = {"transforms": {name: {"enabled": False} for name in ("fuse_swiglu", "merge_gate_up")}}
    apart = graft.compile(module, (x,), decompositions=table, config=off)
    called = {str(node.target) for node in apart.graph_module.graph.nodes}
    assert "aten.silu.default" not in called and "aten.sigmoid.default" in called and "aten.linear.default" in called
    fused = graft.compile(module, (x,), decompositions=table)
    counts = [len(c.report.transforms["fuse_swiglu"].matches) for c in (whole, fused)]
    assert counts == [1, 1]
    module.calls.zero_()
    for compiled in (whole, apart, fused):
        torch.testing.assert_close(compiled(x), nn.functional.silu(module.gate(x)) * module.up(x))
    assert float(module.calls) == 3
    program = torch.export.export(module, (x,))
    taken = graft.compile(program, decompositions=table, config=off)
    assert "aten.silu.default" not in {str(node.target) for node in taken.graph_module.graph.nodes}
    with pytest.raises(UsageError, match="overloads of ops"):
        graft.compile(module, (x,), decompositions={aten.silu: len})


def test_a_program_without_an_op_of_the_table_stays_as_it_is():
    """torch makes functional what it takes apart, and the report says so."""
    table = {aten.silu.default: lambda x: x * torch.sigmoid(x)}

    def shared(compiled):
        x, cache = torch.ones(4), torch.ones(4)
        view = compiled(x, cache)[1]
        return view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()

    def with_silu(x, cache):
        cache.add_(x)
        return nn.functional.silu(x), cache[1:]

    def with_silu_(x, cache):
        cache.add_(x)
        return nn.functional.silu(x.clone(), inplace=True), cache[1:]

    def without(x, cache):
        cache.add_(x)
        return x.sin(), cache[1:]

    for program, apart in ((without, False), (with_silu, True), (with_silu_, True)):
        compiled = graft.compile(program, (torch.ones(4), torch.ones(4)), decompositions=table, backend="eager")
        notes = [note for note in compiled.report.notes if note.startswith("decompositions: the program was made")]
        assert bool(notes) == apart and (apart or shared(compiled))
        called = {str(node.target) for node in compiled.graph_module.graph.nodes}
        assert ("aten.sigmoid.default" in called) == apart


def test_options_go_to_inductor_and_choose_it(tmp_path):
    x = torch.randn(4)
    compiled = graft.compile(lambda x: x.sin() + 1, (x,), options={"max_autotune": True}, fullgraph=True)
    assert compiled.backend == "inductor"
    torch.testing.assert_close(compiled(x), x.sin() + 1)
    compiled.save(tmp_path / "saved")
    assert dict(graft.load(tmp_path / "saved").settings.options) == {"max_autotune": True}
    modes = inductor_patches(InductorSettings("max-autotune-no-cudagraphs"))
    assert modes["max_autotune"] is True
    for asked, problem in (
        ({"options": {"max_autotoon": True}}, "options.max_autotoon is not an option of Inductor.*max_autotune"),
        ({"mode": "fast"}, "mode must be one of .*'reduce-overhead'.*, but is 'fast'"),
        ({"mode": "default", "backend": "eager"}, "mode and options are Inductor's, and the backend is 'eager'"),
        ({"fullgraph": False}, "backend='graft'"),
    ):
        with pytest.raises(UsageError, match=problem):
            graft.compile(lambda x: x + 1, (x,), **asked)


class Counted(CustomGraphPass):
    def __init__(self):
        self.calls = []

    def __call__(self, graph):
        self.calls.append([str(node.target) for node in graph.nodes])

    def uuid(self):
        return "counted"


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize("hook", ["post_grad_custom_pre_pass", "post_grad_custom_post_pass", "joint_custom_pre_pass"])
def test_the_callers_passes_run_beside_grafts(hook, tmp_path):
    norm, x = Norm(), torch.randn(4, 8)
    wanted = norm(x)
    counted, seen = Counted(), len(compilations())
    torch.testing.assert_close(
        torch.compile(norm, options=graft.passes_for_inductor(options={hook: counted}))(x), wanted
    )
    assert len(counted.calls) == 1
    assert len(compilations()[seen].transforms["fuse_rms_norm"].matches) == 1
    if hook == "post_grad_custom_pre_pass":  # the graph that its author knows
        assert not any("graft" in target for target in counted.calls[0])
    compiled = graft.compile(norm, (x,), backend="inductor", options={hook: counted.__call__})
    torch.testing.assert_close(compiled(x), wanted)
    assert len(counted.calls) == 2
    with pytest.raises(ArtifactError, match=f"options.{hook} is no plain value"):
        compiled.save(tmp_path / "saved")
    reset_compiler()
    with torch._inductor.config.patch({hook: counted}):  # set for the whole process
        torch.compile(norm, backend=graft.Backend())(x)
    assert len(counted.calls) == 3


def test_caches_know_a_chain_where_they_know_each_pass():
    ours = inductor_patches(InductorSettings())["post_grad_custom_post_pass"]
    assert ChainedPass([Counted(), ours]).uuid() == ChainedPass([Counted(), ours]).uuid() is not None
    assert ChainedPass([print, ours]).uuid() is None
    assert ChainedPass([lambda nodes: nodes[1:], lambda nodes: nodes[1:]], hands_on=True)([1, 2, 3]) == [3]


class Aware(getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", Counted)):
    def __init__(self):
        self.told = []

    def __call__(self, graph, is_inference=None):
        self.told.append(is_inference)
        return 3

    def uuid(self):
        return "aware"


@pytest.mark.parametrize("hook", ["post_grad_custom_pre_pass", "post_grad_custom_post_pass"])
def test_a_chain_takes_the_passes_that_inductor_takes(hook):
    """Results of passes on graphs are nobody's, and some want to know whether they run for inference."""
    x, seen = torch.randn(4), []
    aware, counts = Aware(), lambda graph: seen.append(graph) or 3
    options = {hook: [aware, counts]} if VERSION >= (2, 13) else {hook: counts}  # torch 2.11 takes no list

    def program(x):
        return x.sin() + 1

    torch.testing.assert_close(torch.compile(program, options=options)(x), program(x))  # stock Inductor's
    reset_compiler()
    stock, aware.told[:] = list(aware.told), []
    compiled = graft.compile(program, (x,), options=options)
    torch.testing.assert_close(compiled(x), program(x))
    torch.testing.assert_close(
        torch.compile(program, options=graft.passes_for_inductor(options=options))(x), program(x)
    )
    assert aware.told == stock * 2 and len(seen) == 3
    chain = ChainedPass([aware, ChainedPass([aware])])
    aware.told.clear()
    chain("graph", is_inference=True)
    assert aware.told == ([True, True] if VERSION >= (2, 13) else [None, None])  # torch 2.11 knows no such passes
