"""Costs of calls, kept and measured, and timelines of schedules."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from graft.api import profile as profiling
from graft.api.profile import DeviceMeasure, measure_costs
from graft.base.errors import ProfileError
from graft.ir.streams import on_device
from graft.ir.trace import export_graph
from graft.passes.costs import Costs, fingerprint, load_costs
from graft.passes.library.streams.schedule import Schedule, ScheduledCall
from graft.workbench.trace import gantt, one_stream, overlap, profiled_slots, trace_events, write_trace


class Layers(nn.Module):
    """Equal layers, a view, a write to a buffer and one to an input."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, cache):
        self.count.add_(1)
        for layer in self.layers:
            x = layer(x).relu()
        cache[0].add_(x[0])
        return x.t() * cache.sum()


def case():
    module = Layers()
    args = (torch.randn(8, 8), torch.zeros(2, 8))
    return module, export_graph(module, args), args


# ── costs ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_call_has_a_cost_and_equal_ones_are_measured_once(monkeypatch):
    module, gm, args = case()
    timed = []
    timer = profiling.CpuTimer.__call__
    monkeypatch.setattr(profiling.CpuTimer, "__call__", lambda self, call: timed.append(call) or timer(self, call))
    costs = measure_costs(gm, args, repeats=2)
    assert set(costs.by_node) == {node.name for node in gm.graph.nodes if on_device(node)}
    assert len({costs.by_node[name] for name in costs.by_node if name.startswith("linear")}) == 1
    assert len(timed) < len(costs.by_node)
    assert all(us > 0 for us in costs.by_node.values()) and costs.device == "cpu"
    assert module.count.item() == 0 and not args[1].any()  # what the graph writes is as it was


def test_costs_are_kept_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path))
    _, gm, args = case()
    costs = DeviceMeasure(args, repeats=2).costs(gm)
    monkeypatch.setattr(profiling, "measure_costs", lambda *_: pytest.fail("measured again"))
    assert DeviceMeasure(args).costs(gm) == costs
    assert DeviceMeasure(args).whole(gm) is None  # no CUDA graph on a CPU


def test_a_damaged_profile_in_the_cache_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path))
    _, gm, args = case()
    costs = DeviceMeasure(args, repeats=2).costs(gm)
    (path,) = (tmp_path / "profiles").glob("*.json")
    path.write_text(path.read_text()[:40])
    assert DeviceMeasure(args, repeats=2).costs(gm).by_node.keys() == costs.by_node.keys()
    assert json.loads(path.read_text())["event_us"] == costs.event_us


def test_a_profile_of_something_else_is_refused(tmp_path):
    _, gm, _ = case()
    path = tmp_path / "costs.json"
    with pytest.raises(ProfileError, match="cannot be read"):
        load_costs(path, gm.graph)
    path.write_text("{")
    with pytest.raises(ProfileError, match="is not a profile"):
        load_costs(path, gm.graph)
    other = Costs({}, 2.0, "cpu", fingerprint="another")
    other.save(path)
    with pytest.raises(ProfileError, match="measured on another graph"):
        load_costs(path, gm.graph)
    replace(other, fingerprint=fingerprint(gm.graph)).save(path)
    with pytest.raises(ProfileError, match="has no cost for %"):
        load_costs(path, gm.graph)


# ── timelines ───────────────────────────────────────────────────────────────────────────────────────────────────

SLOTS = (
    ScheduledCall("norm", "block.norm", 0, 0, 10),
    ScheduledCall("a", "block.a", 0, 10, 30),
    ScheduledCall("b", "block.b", 1, 12, 20),
)


def test_a_trace_has_one_row_a_stream_and_one_slice_a_call(tmp_path):
    path = tmp_path / "deep" / "trace.json"
    write_trace(path, [("predicted", SLOTS), ("again", SLOTS[:1])])
    events = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in slices] == [
        (0, 0, "norm", 0, 10),
        (0, 0, "a", 10, 30),
        (0, 1, "b", 12, 20),
        (1, 0, "norm", 0, 10),
    ]
    assert slices[1]["args"] == {"module": "block.a", "us": 30}
    names = {
        (e["pid"], e.get("tid"), e["args"]["name"]) for e in events if e["name"] in ("process_name", "thread_name")
    }
    assert {(0, None, "predicted"), (0, 0, "stream 0"), (0, 1, "stream 1"), (1, None, "again")} <= names
    assert trace_events([], "nothing") == [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "nothing"}}]


def test_a_schedule_as_text():
    first, second, scale = gantt(SLOTS, width=40)
    assert first.startswith("stream 0 [norm════][a═") and first.endswith("40.0 µs busy")
    assert second.startswith("stream 1 ············[b") and second.endswith("20.0 µs busy")
    assert scale.endswith("40.0 µs") and gantt([]) == []
    tiny = gantt((*SLOTS, ScheduledCall("z", "", 1, 39.99, 0.01)), width=40)
    assert tiny[1][len("stream 1 ") + 39] == "|"


def test_one_stream_is_the_same_calls_in_a_row():
    slots = one_stream(Schedule(SLOTS, 60, 40, 40))
    assert [(slot.stream, slot.start, slot.end) for slot in slots] == [(0, 0, 10), (0, 10, 40), (0, 40, 60)]


def test_overlap_in_numbers():
    found = overlap(SLOTS)
    assert found["kernel_us"] == 60 and found["covered_us"] == found["wall_us"] == 40
    assert found["at_once"] == 1.5 and found["busy_by_stream"] == {"0": 1.0, "1": 0.5}
    alone = overlap(one_stream(Schedule(SLOTS, 60, 40, 40)))
    assert alone["at_once"] == 1.0
    assert overlap([])["at_once"] == 0.0


class FakeProfile:
    """Writes what torch's profiler does: kernels of one CUDA graph under the stream that it was launched on."""

    def export_chrome_trace(self, path):
        kernels = [("a", 100.0, 30.0), ("b", 110.0, 10.0), ("c", 130.0, 5.0)]
        events = [
            {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": us, "args": {"device": 0, "stream": 7}}
            for name, ts, us in kernels
        ]
        events.append({"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 0, "dur": 500})
        events.append({**events[0], "name": "elsewhere", "args": {"device": 1, "stream": 7}})
        with open(path, "w") as file:
            json.dump({"traceEvents": events}, file)


def test_kernels_that_overlap_get_rows_of_their_own():
    slots = profiled_slots(FakeProfile())
    assert [(s.node, s.stream, s.start, s.us) for s in slots] == [("a", 0, 0, 30), ("b", 1, 10, 10), ("c", 0, 30, 5)]
