"""CUDA graphs: recorded is what was recorded; one that is skipped when it runs has its reason, too. There is no GPU
here, so what torch says of one is said to its logger as torch says it."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.cudagraph_trees
import torch._inductor.cudagraph_utils
import torch._inductor.scheduler
import torch.fx.traceback
from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

from graft.stages import cudagraphs
from graft.stages.bucket_story import PieceCompiled
from graft.stages.buckets import piece_name, settled
from graft.stages.cudagraphs import (
    LOGGER,
    NO_PART,
    NOT_CALLED,
    SeenCudagraphs,
    compiled_record,
    cuts_of,
    final_records,
    reason_text,
    watch_cudagraphs,
)
from graft.stages.needs import Reached
from graft.stages.runtime import runtime_stage
from graft.stages.story import Story
from graft.stages.story_code import CudagraphRecord, PartitionCut, RuntimeStage
from graft.stages.tell import recorded_calls, tell_story
from graft.stages.trace import TraceCollector, TraceRow
from graft.workbench.stages.questions import why_no_cudagraph
from graft.workbench.stages.text import story_lines

MUTATED = """skipping cudagraphs due to mutated inputs (1 instances). Found from :
   File "/home/me/decode.py", line 8, in step
    cache.mul_(2)
"""
REASON = "mutated inputs (1 instances) (decode.py:8)"
TO_RECORD = CudagraphRecord("0/0", asked=True, recorded=True)


def compiled(**facts) -> SimpleNamespace:
    return SimpleNamespace(device_types={"cuda"}, **facts)


def texts(stage: RuntimeStage) -> list[str]:
    return [line.text.strip() for line in story_lines(Story("f", "inductor", "2.13", "cuda:0", runtime=stage), 6)]


def test_reasons_are_one_line_with_the_program_s_line():
    assert reason_text(MUTATED) == REASON
    twice = "skipping cudagraphs due to skipping cudagraphs due to multiple devices: 'cpu'"
    assert (
        reason_text(twice) == "multiple devices: 'cpu'" and reason_text("skipping cudagraphs due to ['no']") == "no"
    )
    limit = "skipping cudagraph due to function 0 exceeding max re-recording limit (=128) on cudagraph node 1."
    assert reason_text(limit) == limit.partition(" due to ")[2].rstrip(".")


def test_a_graph_that_torch_skips_while_it_runs_is_not_recorded():
    seen, reached = SeenCudagraphs([TO_RECORD]), Reached()
    assert seen.pending()
    with watch_cudagraphs(seen, reached):
        reached.graph = "0/0"
        torch._inductor.cudagraph_utils.log_cudagraph_skip_and_bump_counter(MUTATED)
        logging.getLogger(LOGGER).warning("something else that torch warns of")
    assert not seen.pending() and final_records(seen) == (CudagraphRecord("0/0", True, False, REASON),)
    story = Story("f", "inductor", "2.13", "cuda:0", runtime=RuntimeStage(cudagraphs=final_records(seen)))
    assert why_no_cudagraph(story).answer == f"1 of 1 skipped: {REASON}"
    torch._inductor.cudagraph_utils.log_cudagraph_skip_and_bump_counter(MUTATED)  # after it nobody listens
    assert len(seen.skips["0/0"]) == 1


def test_a_graph_that_is_recorded_is_told_as_that_and_no_other(monkeypatch):
    monkeypatch.setattr(CUDAGraphTreeManager, "record_function", lambda self, inputs, function: inputs)
    seen, reached = SeenCudagraphs([TO_RECORD, CudagraphRecord("1/0", asked=True, recorded=True)]), Reached()
    with watch_cudagraphs(seen, reached):
        reached.graph = "0/0"
        assert CUDAGraphTreeManager.record_function(None, [1], 0) == [1]
    assert [one.recorded for one in final_records(seen)] == [True, False] and seen.pending()
    assert final_records(seen)[1].reason == NOT_CALLED
    seen.skips["0/0"] = [REASON]  # one of several parts
    assert final_records(seen)[0].reason == f"a part of it: {REASON}"


def test_the_calls_are_made_again_until_graphs_are_recorded():
    calls: list[int] = []

    def watch(seen: SeenCudagraphs) -> SimpleNamespace:
        return SimpleNamespace(runtime=seen, reached=Reached(), notes=[])

    def recording(number: int) -> None:
        calls.append(number)
        seen.captured.add("0/0")

    seen = SeenCudagraphs([TO_RECORD])
    assert recorded_calls(watch(seen), recording, [(1,), (2,)]) is None and calls == [1]
    assert recorded_calls(watch(SeenCudagraphs([])), recording, [(1,)]) is None and calls == [1]


def test_what_is_known_when_a_graph_is_compiled():
    assert compiled_record("0/0", compiled(), asked=True, kept=True) == TO_RECORD
    assert not compiled_record("0/0", compiled(), asked=False, kept=False).recorded
    cpu = compiled_record("0/0", compiled(disabled_cudagraphs_reason=MUTATED), asked=True, kept=False)
    assert cpu.reason == REASON and not cpu.recorded
    none = compiled_record("0/0", compiled(partition_maps=[]), asked=True, kept=False)
    assert none.reason == NO_PART
    assert compiled_record("0/0", compiled(), asked=True, kept=False).reason == "Inductor gives no reason"


def test_a_torch_without_the_names_says_so(monkeypatch):
    monkeypatch.setattr(cudagraphs, "NEEDS", ("torch._inductor.cudagraph_trees:Gone",))
    seen = SeenCudagraphs([TO_RECORD])
    with watch_cudagraphs(seen, Reached()):
        pass
    assert "cannot be watched" in final_records(seen)[0].reason and not final_records(seen)[0].recorded


def test_nodes_that_a_graph_is_parted_at_have_their_reason(monkeypatch):
    scheduler = torch._inductor.scheduler.Scheduler
    node = SimpleNamespace(get_name=lambda: "op3")
    monkeypatch.setattr(scheduler, "should_partition", lambda self, node: "cpu ops")
    seen = SeenCudagraphs()
    with watch_cudagraphs(seen, Reached()):
        scheduler.should_partition(None, node)
        assert not seen.cuts  # CUDA graphs are not asked for: all is one part
        with torch._inductor.config.patch({"triton.cudagraphs": True}):
            assert scheduler.should_partition(None, node) == "cpu ops"
    cuts = cuts_of(seen, [""])
    assert cuts == (PartitionCut("", "op3", "cpu ops"),) and cuts_of(seen, ["0/0"]) == ()
    told = texts(RuntimeStage(partitions={"": 2}, cuts=cuts))
    assert "is recorded in 2 parts, around op3 (cpu ops)" in told
    assert not any("part" in line for line in texts(RuntimeStage(partitions={"0/0": 1})))


@pytest.mark.parametrize(
    ("code", "streams", "own", "text"),
    [
        ("stream0 = get_raw_stream(0)\nk.run(x, stream=stream0)\n", 1, 0, "launches on 1 current stream"),
        ("raw_stream0 = get_raw_stream(0)\nraw_stream1 = get_raw_stream(1)\n", 2, 0, "launches on 2 current streams"),
        (
            "raw_stream0 = get_raw_stream(0)\nstream1 = get_external_object_by_index(4)\nwith stream1:\n    pass\n",
            2, 1, "launches on 1 current stream and 1 of the program's own",
        ),
        ("cpp_fused_0(buf0)\n", 0, 0, ""),
    ],
)  # fmt: skip
def test_streams_that_code_launches_on(code, streams, own, text):
    """As torch 2.11 and 2.13 write it: a device's current stream is no stream of the program's."""
    collector = TraceCollector()
    collector.rows.append(TraceRow("inductor_output_code", "0/0", {}, f"def call(args):\n{code}"))
    stage = runtime_stage(SeenCudagraphs(), collector)
    assert (stage.streams, stage.side_streams) == (streams, own)
    assert (text in texts(stage)) if text else not any("stream" in line for line in texts(stage))


def test_a_piece_for_a_size_is_captured_if_it_was():
    piece = PieceCompiled(8, 1, "compiled", 1.0, 2, captured=True)
    seen = SeenCudagraphs(captured={piece_name(8, 1)})
    assert settled(seen, piece).captured and not settled(SeenCudagraphs(), piece).captured
    skipped = settled(SeenCudagraphs(skips={piece_name(8, 1): [REASON]}), piece)
    assert (skipped.captured, skipped.reason) == (False, REASON)
    plain = PieceCompiled(8, 1, "compiled", 1.0, 2, captured=False, reason="the graph runs on cpu")
    assert settled(seen, plain) is plain


def test_streams_that_the_code_does_not_keep_are_told():
    """Inductor of torch 2.11 launches everything on the current stream."""

    def beside(x):
        with torch.fx.traceback.annotate({"stream": 3}):  # what Dynamo notes of `with torch.cuda.stream(...)`
            y = x.sin()
        return y + x

    story = tell_story(beside, [(torch.ones(2),)], backend="eager")
    assert story.dynamo.graphs and story.runtime.entered_streams == 1
    told = texts(RuntimeStage(streams=1, entered_streams=1))
    assert "streams that the program enters and the code does not: 1, whose work is on the current one" in told
    kept = texts(RuntimeStage(streams=2, side_streams=1, entered_streams=1))
    assert not any("does not" in line for line in kept)
    assert tell_story(lambda x: x + 1, [(torch.ones(2),)], backend="eager").runtime.entered_streams == 0
