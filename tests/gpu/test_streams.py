"""Streams on a GPU: the bits of one stream, whatever the streams' speeds, captured and not."""

from __future__ import annotations

import json
import random
import runpy
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import graft
from graft.api.profile import DeviceMeasure
from graft.backends.eager import lower_eager
from graft.backends.streams import Streams
from graft.base.errors import StreamOrderError
from graft.ir.edit import second_module
from graft.ir.streams import on_device, stream_op
from graft.ir.trace import export_graph
from graft.memory.stream_hazards import check_streams
from graft.passes.costs import Costs
from graft.passes.library.streams.emit import apply_schedule
from graft.passes.library.streams.schedule import Schedule, ScheduledCall

FORCED = {"transforms": {"schedule_streams": {"enabled": True, "force": True, "streams": 3}}}
MILLISECOND = 1_500_000  # cycles, about


class Branches(nn.Module):
    """Three branches of different lengths over one norm, a state that two of them touch, and a join."""

    def __init__(self, width=512):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.long = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.short, self.other = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("state", torch.zeros(width))

    def forward(self, x):
        h = self.norm(x)
        a = h
        for layer in self.long:
            a = layer(a).relu()
        b = torch.nn.functional.gelu(self.short(h))
        self.state.add_(b.mean(0))
        c = self.other(h + self.state)
        return a + b * c, self.state * 2


def inputs(seed, width=512):
    return torch.randn(16, width, generator=torch.Generator().manual_seed(seed)).cuda()


def fixed_costs(_, gm):
    return Costs({node.name: 10.0 for node in gm.graph.nodes if on_device(node)}, 1.0, "fixed")


@pytest.fixture
def module():
    torch.manual_seed(0)
    return Branches().cuda().eval()


@pytest.fixture
def sleeps(monkeypatch):
    """Every stream stops for a random time before calls and records and after waits; a branch always pays."""
    monkeypatch.setattr(DeviceMeasure, "costs", fixed_costs)
    chance = random.Random(0)
    on, record, wait = Streams.on, Streams.record, Streams.wait

    def nap(streams, number):
        main = torch.cuda.current_stream(streams.device)
        with torch.cuda.stream(streams.stream(main, number)):
            torch.cuda._sleep(chance.choice([0, 0, MILLISECOND // 10, MILLISECOND]))

    def sleepy_on(self, number, target):
        run = on(self, number, target)

        def call(*args, **kwargs):
            nap(self, number)
            return run(*args, **kwargs)

        call.__name__ = run.__name__
        return call

    def sleepy_record(self, number, event):
        nap(self, number)
        record(self, number, event)

    def sleepy_wait(self, number, event):
        wait(self, number, event)
        nap(self, number)

    monkeypatch.setattr(Streams, "on", sleepy_on)
    monkeypatch.setattr(Streams, "record", sleepy_record)
    monkeypatch.setattr(Streams, "wait", sleepy_wait)


def reference(module, seeds):
    """Eager results on one stream, by graft's own kernels, from a state of zeros."""
    module.state.zero_()
    one = graft.compile(module, (inputs(0),), backend="eager")
    results = []
    for seed in seeds:
        results.append([t.clone() for t in one(inputs(seed))])
    return results


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "cuda_graph"])
def test_the_same_bits_over_fifty_calls_with_sleeping_streams(module, sleeps, backend):
    seeds = range(50)
    expected = reference(module, seeds)
    module.state.zero_()
    many = graft.compile(module, (inputs(0),), config=FORCED, backend=backend)
    assert many.report.transforms["schedule_streams"].status == "applied"
    assert str(many.report.kernels["graft::stream_switch"]).endswith("CUDA streams")
    assert torch.equal(module.state, torch.zeros_like(module.state))  # measuring left it alone
    got = [[t.clone() for t in many(inputs(seed))] for seed in seeds]  # nothing waits for the device in between
    torch.cuda.synchronize()
    for left, right in zip(got, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@torch.no_grad()
def test_ten_captures_with_other_sleeps_each(module, sleeps):
    expected = reference(module, range(5))
    for _ in range(10):
        module.state.zero_()
        many = graft.compile(module, (inputs(0),), config=FORCED, backend="cuda_graph")
        for seed in range(5):
            assert all(torch.equal(a, b) for a, b in zip(many(inputs(seed)), expected[seed], strict=True))


class Join(nn.Module):
    def forward(self, x):
        h = x * 2
        side = h + 1
        a = h * 3
        b = a + 5
        c = b * 7
        return side + c


def scheduled(streams):
    """Join with its calls on the given streams, ready to run."""
    gm = export_graph(Join(), (torch.ones(4 << 20, device="cuda"),))
    names = [node.name for node in gm.graph.nodes if on_device(node)]
    slots = tuple(ScheduledCall(name, "", stream, 0.0, 1.0) for name, stream in zip(names, streams, strict=True))
    apply_schedule(gm, Schedule(slots, 1.0, 1.0, 1.0), "test")
    check_streams(gm.graph)
    return gm


def lowered_with_nap(gm, monkeypatch):
    """Calls on side streams come 20 ms late."""
    on = Streams.on

    def late(self, number, target):
        def nap(*args, **kwargs):
            torch.cuda._sleep(20 * MILLISECOND)
            return target(*args, **kwargs)

        nap.__name__ = "nap"
        return on(self, number, nap)

    monkeypatch.setattr(Streams, "on", late)
    gm.recompile()
    return lower_eager(gm).call


def without(gm: GraphModule, kind: str, which: int) -> GraphModule:
    twin = second_module(gm)
    for node, copy in zip(gm.graph.nodes, twin.graph.nodes, strict=True):
        copy.meta = dict(node.meta)
    found = [node for node in twin.graph.nodes if (stream_op(node) or ("",))[0] == kind]
    twin.graph.erase_node(found[which])
    return twin


@torch.no_grad()
def run_again(call, seed):
    """After a call with other values: the allocator has blocks of this size and gives the lowest one first."""
    x = torch.randn(4 << 20, generator=torch.Generator().manual_seed(seed)).cuda()
    call(x + 1)
    torch.cuda.synchronize()
    result = call(x)
    torch.cuda.synchronize()
    return only(result).clone(), Join()(x)


def only(result):
    return result[0] if isinstance(result, (list, tuple)) else result


def test_a_removed_wait_is_caught_and_would_have_been_wrong(monkeypatch):
    gm = scheduled([0, 1, 0, 0, 0, 0])
    right = lowered_with_nap(gm, monkeypatch)
    for seed in range(3):
        got, expected = run_again(right, seed)
        assert torch.equal(got, expected)
    monkeypatch.undo()
    broken = without(gm, "wait", -1)  # the join
    with pytest.raises(StreamOrderError, match=r"on stream 0 does not wait for %add .* on stream 1: it takes %add"):
        check_streams(broken.graph)
    wrong = lowered_with_nap(broken, monkeypatch)
    outcomes = [torch.equal(*run_again(wrong, seed)) for seed in range(3)]
    assert not all(outcomes)


def test_a_removed_keep_is_caught_and_would_have_been_wrong(monkeypatch):
    gm = scheduled([0, 1, 0, 0, 0, 0])
    assert any((stream_op(node) or ("",))[0] == "keep" for node in gm.graph.nodes)
    broken = without(gm, "keep", 0)
    with pytest.raises(StreamOrderError, match=r"may get the memory of %mul"):
        check_streams(broken.graph)
    wrong = lowered_with_nap(broken, monkeypatch)
    outcomes = [torch.equal(*run_again(wrong, seed)) for seed in range(3)]
    assert not all(outcomes)  # `b` or `c` was written over `h` while stream 1 had still to read it


@torch.no_grad()
def test_an_error_on_a_side_stream_leaves_the_callers_stream_current(monkeypatch):
    def fail(self, number, target):
        def run(*args, **kwargs):
            with torch.cuda.stream(self.stream(torch.cuda.current_stream(), number)):
                raise RuntimeError("no memory")

        return run

    monkeypatch.setattr(Streams, "on", fail)
    call = lower_eager(scheduled([0, 1, 0, 0, 0, 0])).call
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="no memory"):
        call(torch.ones(4 << 20, device="cuda"))
    assert torch.cuda.current_stream() == before


@torch.no_grad()
def test_threads_on_streams_of_their_own():
    call, join, failed = lower_eager(scheduled([0, 1, 0, 0, 0, 0])).call, Join(), []

    def work(seed):
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(20):
                x = torch.randn(4 << 20, device="cuda")
                if not torch.equal(only(call(x)), join(x)):
                    failed.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


@torch.no_grad()
def test_costs_are_measured_and_the_verdict_has_numbers(module, tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path))
    config = {"transforms": {"schedule_streams": {"enabled": True, "threshold": 0.0}}}
    compiled = graft.compile(module, (inputs(0),), config=config, backend="cuda_graph")
    record = compiled.report.transforms["schedule_streams"]
    assert record.status in ("applied", "no_match")
    assert "µs" in record.reason
    costs = DeviceMeasure((inputs(0),), cached=False).costs(compiled.graph_module)
    assert costs.event_us > 0 and 0 < max(costs.by_node.values()) < 1e5
    assert costs.device == torch.cuda.get_device_name(0)
    whole = DeviceMeasure((inputs(0),)).whole(compiled.graph_module)
    assert whole is not None and whole > 0
    assert list((tmp_path / "profiles").glob("*.json"))


def test_the_example_shows_overlap_in_numbers(monkeypatch, capsys, tmp_path):
    folder = Path(__file__).parents[2] / "examples"
    trace = tmp_path / "trace.json"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "argv", ["multistream_overlap.py", "--json", "--trace", str(trace)])
    runpy.run_path(str(folder / "multistream_overlap.py"), run_name="__main__")
    results = json.loads(capsys.readouterr().out)
    assert len(results) == 2 and all("reason" in result for result in results)
    for result in results:
        if "overlap" in result:
            assert result["same_bits"] and result["overlap"]["at_once"] >= 1.0
    assert any(event["ph"] == "X" for event in json.loads(trace.read_text())["traceEvents"])
