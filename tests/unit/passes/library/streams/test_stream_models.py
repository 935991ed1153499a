"""Streams on whole decoders: the proof holds, and the new order gives the same tokens."""

from __future__ import annotations

from functools import partial

import pytest

import graft
from graft.ir.streams import on_device, stream_op
from graft.memory.hazards import hazards
from graft.memory.stream_hazards import check_streams
from graft.ops.streams import SWITCH
from graft.passes.base import Context
from graft.passes.costs import Costs
from marks import short

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [3] * 20]


class Uneven:
    """Costs that differ from call to call, so that the order of the graph changes."""

    def costs(self, gm):
        names = [node.name for node in gm.graph.nodes if on_device(node)]
        return Costs({name: 1.0 + (7 * index) % 11 for index, name in enumerate(names)}, 0.5, "made up")

    def whole(self, gm):
        return None


def tokens(model, monkeypatch, **options):
    monkeypatch.setattr("graft.engine.setup.stages.Context", partial(Context, measure=Uneven()))
    llm = graft.LLM(model, dtype="float32", config={"transforms": {"schedule_streams": options}}, backend="eager")
    params = graft.SamplingParams(max_tokens=8)
    return llm, [output.token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "streams"), short([("tiny-cohere", 2), ("tiny-qwen3-moe", 4)], ("tiny-cohere", 2)))
def test_decoders_on_streams_give_the_same_tokens(model, streams, monkeypatch):
    plain, expected = tokens(model, monkeypatch, enabled=False)
    llm, got = tokens(model, monkeypatch, enabled=True, force=True, streams=streams)
    record = llm.report.transforms["schedule_streams"]
    assert record.status == "applied" and len(record.matches) >= 2, record.reason
    graph = llm.graph_module.graph
    check_streams(graph)
    assert hazards(graph)  # the cache is written in place
    assert {node.args[0] for node in graph.nodes if node.target is SWITCH} >= {0, 1}
    order = [node.name for node in graph.nodes if on_device(node)]
    assert order != [node.name for node in plain.graph_module.graph.nodes if on_device(node)]
    assert got == expected
    waits = [node for node in graph.nodes if (stream_op(node) or ("",))[0] == "wait"]
    assert len(waits) < len(order)
