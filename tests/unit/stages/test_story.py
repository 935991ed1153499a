"""One run of torch.compile as data: what each stage tells, how a story ends early, what is left behind (nothing)."""

from __future__ import annotations

import inspect
import json
import logging
import re

import pytest
import torch
import torch._dynamo.guards
import torch._dynamo.output_graph
import torch._inductor.compile_fx
import torch._inductor.cudagraph_trees
import torch._inductor.debug
import torch._inductor.graph
import torch._inductor.ir
import torch._inductor.output_code
import torch._inductor.pattern_matcher
import torch._inductor.scheduler
import torch.fx.passes.graph_transform_observer
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor.codecache import FxGraphCache
from torch._inductor.codegen import cpp, triton
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.select_algorithm import AlgorithmSelectorCache, get_algorithm_selector_cache

import stage_programs as programs
from graft.stages import autotune, caches, dynamo, needs, tell, watch
from graft.stages.cudagraphs import SeenCudagraphs
from graft.stages.needs import missing, version_note
from graft.stages.revive import revive
from graft.stages.runtime import runtime_stage
from graft.stages.story import STAGES, Story
from graft.stages.tell import tell_story
from graft.stages.trace import TraceCollector, TraceRow
from graft.stages.watch import ADAPTERS, missing_names, watching
from graft.workbench.stages.text import story_lines
from testing_kit_cases import Gated, X

GraphTransformObserver = torch.fx.passes.graph_transform_observer.GraphTransformObserver
WRITTEN = "set_kernel_post_grad_provenance_tracing"
LOGGERS = ("torch.__trace", "torch._dynamo.convert_frame", "torch._inductor.cudagraph_utils.__cudagraphs")
WATCHED = (
    (torch._dynamo.output_graph.OutputGraph, "call_user_compiler"),
    (torch._dynamo.guards, "get_guard_fail_reason_helper"),
    (torch._dynamo.guards, "guard_manager_testing_hook_fn"),
    (torch._inductor.compile_fx, "_recursive_joint_graph_passes"),
    (torch._inductor.compile_fx, "_recursive_post_grad_passes"),
    (GraphTransformObserver, "apply_graph_pass"),
    (GraphTransformObserver, "apply_gm_pass"),
    (torch._inductor.pattern_matcher.PatternMatcherPass, "apply"),
    (torch._inductor.scheduler.Scheduler, "fuse_nodes"),
    (torch._inductor.scheduler.Scheduler, "can_fuse"),
    (torch._inductor.scheduler.WhyNoFuse, "__call__"),
    (torch._inductor.ir.ExternKernel, "copy_input"),
    (torch._inductor.graph.GraphLowering, "call_function"),
    (torch._inductor.graph.GraphLowering, "run"),
    (AlgorithmSelectorCache, "__call__"),
    (CachingAutotuner, "bench"),
    *((module, WRITTEN) for module in (torch._inductor.debug, cpp, triton)),
    (torch._inductor.output_code.CompiledFxGraph, "post_compile"),
    (torch._inductor.cudagraph_trees.CUDAGraphTreeManager, "record_function"),
    (torch._inductor.scheduler.Scheduler, "should_partition"),
    (FxGraphCache, "_get_tmp_dir"),
    (AOTAutogradCache, "_get_tmp_dir"),
)


@pytest.fixture(scope="module")
def step(timed_guards: None) -> Story:
    return tell_story(programs.step, programs.step_inputs(), mode="reduce-overhead")


def line_of(text: str) -> str:
    """Of the first line of `step` with the text."""
    lines, first = inspect.getsourcelines(programs.step)
    return f"stage_programs.py:{first + next(index for index, line in enumerate(lines) if text in line)}"


def test_every_name_that_an_adapter_needs_is_in_this_torch():
    assert missing_names() == {} and set(STAGES) <= set(ADAPTERS)
    for names in (*ADAPTERS.values(), autotune.CONFIGS):
        assert names and not missing(names)


def test_a_name_that_torch_lost_is_named():
    lost = "torch._inductor.scheduler:WhyNoFuse.gone"
    assert missing([lost]).endswith(f"has no {lost}")
    assert "torch.no_such_module" in missing(["torch.no_such_module:name"])


def test_a_torch_outside_the_range_is_told(monkeypatch):
    assert version_note() == ""
    monkeypatch.setattr(needs.torch, "__version__", "2.20.1")
    assert "torch 2.20.1 is outside 2.11 to 2.13" in version_note()


def test_dynamo_tells_graphs_and_guards(step):
    (graph,) = step.dynamo.graphs
    assert graph.frame == "step" and not step.dynamo.breaks and not step.dynamo.recompilations
    assert {node.line for node in graph.nodes if node.op == "mul_"} == {line_of("cache.mul_")}
    kinds = {group.kind: group.count for group in step.dynamo.guards}
    assert kinds["TENSOR_MATCH"] == 4 and step.dynamo.guard_us["0/0"] > 0


def test_every_guard_has_its_cost(step):
    groups = {group.kind: group for group in step.dynamo.guards}
    tensors = groups["TENSOR_MATCH"]
    assert tensors.timed == tensors.count and tensors.us > 0 and set(tensors.on) >= {"L['x']", "L['w']"}
    assert {kind for kind, group in groups.items() if group.timed < group.count} <= {"NO_TENSOR_ALIASING"}
    dear = step.dynamo.dearest
    assert dear and list(dear) == sorted(dear, key=lambda one: -one.us)
    assert max(one.us for one in dear) > 0 and 0 < step.dynamo.guard_warm_us["0/0"] < step.dynamo.guard_us["0/0"]
    told = "\n".join(line.text for line in story_lines(step, 1))
    assert re.search(r"TENSOR_MATCH × 4 \d+\.\d\d µs", told) and "dearest: " in told


def test_a_check_with_nothing_in_the_cache_is_a_median(monkeypatch, timed_guards):
    """Of the one reading that torch takes a busy machine makes anything."""
    readings = iter([9000.0, 50.0, 51.0, 52.0, 8000.0])
    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: next(readings, 7000.0))
    story = tell_story(programs.longer, programs.longer_inputs()[:1], backend="eager")
    assert story.dynamo.guard_us == {"0/0": 52.0}


def test_a_dear_guard_is_seen_as_that_and_aliases_are_not_timed():
    """300 entries of a dict, whose keys are compared one by one, against one number."""
    table = {f"k{index}": index for index in range(300)}

    def looked_up(x, y, k):
        return x * k + y + sum(table.values())

    story = tell_story(looked_up, [(torch.ones(2), torch.ones(2), 2)], backend="eager")
    costs = {one.kind: one for one in story.dynamo.guards}
    assert costs["NO_TENSOR_ALIASING"].count == 2 and costs["NO_TENSOR_ALIASING"].timed == 0
    numbers, whole = costs["EQUALS_MATCH"], story.dynamo.guard_warm_us["0/0"]
    assert numbers.count > 300 and numbers.us > 0.8 * whole
    assert sum(one.us for one in costs.values()) == pytest.approx(whole, rel=0.05)


def test_without_torchs_hook_guards_are_counted_and_not_timed(monkeypatch):
    monkeypatch.setattr(dynamo, "GUARDS", ("torch._dynamo.guards:gone",))
    story = tell_story(programs.longer, programs.longer_inputs()[:1], backend="eager")
    assert story.dynamo.guards and not story.dynamo.dearest and all(not one.timed for one in story.dynamo.guards)


def test_functionalization_tells_what_became_of_ops_and_writes(step):
    stage = step.functional
    assert ("aten.silu", 1) in {(one.op, one.times) for one in stage.decompositions}
    assert "aten.silu" in {node.op for node in stage.whole[0].nodes}
    assert "aten.silu" not in {node.op for node in stage.graphs[0].nodes}
    fates = {one.line: one for one in stage.mutations}
    scaled = next(one for one in stage.mutations if one.by == "aten.mul.Tensor")
    assert "in place" in scaled.fate and not scaled.copied_bytes, fates
    whole = next(one for one in stage.mutations if one.by == "aten.copy")
    assert "is copied into it" in whole.fate and whole.copied_bytes == 4 * 16 * 4


def test_passes_and_the_last_graph(step):
    assert {node.op for node in step.post_grad.graphs[0].nodes} >= {"aten.mm", "aten.exp"}
    assert all(one.removed or one.added or one.matches or one.ms > 5 for one in step.post_grad.passes)


def test_scheduling_tells_groups_reasons_and_copies(step):
    stage = step.scheduling
    assert {node.kind for node in stage.nodes} >= {"Pointwise", "Reduction", "ExternKernelOut"}
    assert any(len({n.name for n in stage.nodes if n.group == node.group}) > 1 for node in stage.nodes)
    assert stage.refusals and all(one.reason for one in stage.refusals)
    assert 0 < stage.bytes_after["0/0"] < stage.bytes_before["0/0"]
    assert {one.bytes for one in stage.copies} == {256, 128}  # y into out, x.t() made contiguous


def test_kernels_tell_source_nodes_and_lines(step):
    kernels = {kernel.name: kernel for kernel in step.kernels.kernels}
    assert kernels["extern_kernels.mm"].lines == (line_of("h @ w"),)
    (silu,) = (kernel for name, kernel in kernels.items() if "silu" in name)
    assert silu.language == "cpp" and "exp" in silu.source and line_of("h = ") in silu.lines
    assert "cpu" in step.kernels.resources


def test_a_cuda_graph_that_cannot_be_recorded_has_a_reason(step):
    (record,) = step.runtime.cudagraphs
    assert record.asked and not record.recorded and record.reason.startswith("the graph runs on cpu")
    assert step.runtime.allocations["0/0"] >= 2


def test_partitions_streams_and_collectives_are_read_off_the_code():
    code = """
class Runner:
    def partition_0(self, args):
        buf0 = empty_strided_cuda((4,), (1,), torch.float32)
        stream0 = get_raw_stream(0)
    def partition_1(self, args):
        torch.ops._c10d_functional.all_reduce_.default(buf0, 'sum', '0')
    def call(self, args):
        buf1 = empty_strided_cuda((4,), (1,), torch.float32)
        buf2 = buf1; del buf1  # reuse
"""
    collector = TraceCollector()
    collector.rows.append(TraceRow("inductor_output_code", "0/0", {}, code))
    stage = runtime_stage(SeenCudagraphs(), collector)
    assert stage.partitions == {"0/0": 2} and stage.streams == 1 and stage.collectives == ("all_reduce_",)
    assert stage.reused == {"0/0": 1}


def test_caches_tell_misses_then_hits(step):
    stage = step.caches
    assert [(one.cache, one.outcome) for one in stage.lookups] == [("aotautograd", "miss"), ("fx_graph", "miss")]
    assert {one.outcome for one in stage.again} == {"hit"} and stage.bytes > 1000
    assert "example_inputs[0]" in stage.lookups[1].components


def test_a_story_comes_back_from_json(step):
    assert Story.from_dict(json.loads(json.dumps(step.to_dict()))) == step
    with pytest.raises(ValueError, match="has no strange"):
        revive(Story, {"target": "a", "strange": 1})


def test_grafts_fusions_are_told_in_their_place_and_once():
    story = tell_story(Gated(), [(X,)], backend="graft")
    fusions = [one for one in story.post_grad.fusions if one.transform == "fuse_swiglu"]
    assert [(one.status, one.matches) for one in fusions] == [("applied", 1)] and story.end is None
    assert "graft.swiglu" in {node.op for node in story.post_grad.graphs[0].nodes}
    assert "torch.ops.graft.swiglu.default" in {kernel.name for kernel in story.kernels.kernels}


def test_nothing_is_left_behind_and_nothing_is_there_before():
    """Not after an error within, either; so the collector costs nothing where it is not used."""

    def state() -> list[object]:
        loggers = [logging.getLogger(name) for name in LOGGERS]
        found = [inspect.getattr_static(owner, name) for owner, name in WATCHED]
        found += [
            [type(one) for one in logger.handlers if type(one).__module__.startswith("graft")] for logger in loggers
        ]
        savers = tuple(get_algorithm_selector_cache().feedback_saver_fns)
        return [*found, savers, torch._inductor.config.trace.provenance_tracking_level]

    before, trace = state(), logging.getLogger("torch.__trace")
    alone = trace.level, trace.propagate
    with pytest.raises(RuntimeError, match="within"), watching():
        during = state()
        raise RuntimeError("within")
    assert [index for index, (one, two) in enumerate(zip(before, during, strict=True)) if one == two] == []
    assert state() == before and (trace.level, trace.propagate) == alone


def test_a_stage_that_cannot_be_watched_says_so_and_the_others_are_told(monkeypatch):
    lost = ("torch._inductor.scheduler:Gone",)
    monkeypatch.setitem(watch.ADAPTERS, "scheduling", lost)
    monkeypatch.setitem(watch.ADAPTERS, "caches", lost)
    monkeypatch.setattr(caches, "NEEDS", lost)
    story = tell_story(programs.longer, programs.longer_inputs()[:1])
    assert story.end is None and story.kernels.kernels and not story.scheduling.nodes
    assert story.scheduling.problem.endswith(f"has no {lost[0]}") and story.caches.problem == story.scheduling.problem


def test_without_the_trace_there_is_an_end_and_no_traceback(monkeypatch):
    monkeypatch.setattr(tell, "TRACE", ("torch._logging.structured:Gone",))
    story = tell_story(programs.longer, programs.longer_inputs())
    assert story.end and story.end.error.endswith("has no torch._logging.structured:Gone") and not story.dynamo.graphs


def test_a_program_that_raises_ends_its_story():
    story = tell_story(programs.raises, programs.raises_inputs(), backend="eager")
    assert story.end and "ValueError: not today" in story.end.error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_the_reason():
    story = tell_story(lambda x: x.cuda() + 1, [(torch.ones(2),)], backend="eager")
    told = (
        story.end.error.upper() if story.end else ""
    )  # a build with CUDA ends in the call, one without while it traces
    assert "CUDA" in told or "NVIDIA DRIVER" in told, story.end


def test_an_extra_that_fails_is_a_note_and_the_others_are_there(monkeypatch):
    def fails(*_args, **_kwargs):
        raise RuntimeError("no clock")

    monkeypatch.setattr(tell, "measure_graphs", fails)
    story = tell_story(programs.longer, programs.longer_inputs()[:1])
    assert story.notes == ("timing kernels failed: RuntimeError: no clock",) and story.end is None
    assert story.functional.whole and story.caches.again and not story.kernels.kernels[0].us


def test_a_pass_that_raises_ends_the_story_in_stage_3():
    def broken(graph):
        raise RuntimeError("this pass is broken")

    story = tell_story(programs.longer, programs.longer_inputs(), options={"post_grad_custom_post_pass": broken})
    assert story.end and story.end.stage == 3 and "this pass is broken" in story.end.error
    assert story.dynamo.graphs and story.functional.graphs and not story.kernels.kernels


def test_recompiling_without_end_is_told():
    story = tell_story(programs.endless, programs.endless_inputs(), backend="eager")
    assert story.end is None and len(story.dynamo.graphs) < len(story.calls)
    assert any("recompile_limit" in note for note in story.dynamo.notes)


def test_a_function_of_breaks_alone_has_a_story():
    story = tell_story(programs.untraceable, programs.untraceable_inputs(), backend="eager")
    assert story.end is None and story.dynamo.breaks
    assert "nothing was compiled" in story.dynamo.problem or story.dynamo.graphs
