"""Streams: schedules from costs, stream ops in a graph, and the proof that nobody sees another order."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import GraphModule

import graft
from graft.backends import lower
from graft.base.errors import StreamOrderError, TransformError, VerificationError
from graft.ir.canonical.normal_form import canonicalize, drop_dead
from graft.ir.io.serial import graph_from_json, graph_to_json
from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, is_op
from graft.ir.streams import on_device, stream_op
from graft.memory.stream_hazards import check_streams
from graft.memory.verify import Uses
from graft.ops.streams import KEEP, RECORD, SWITCH, WAIT
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.costs import Costs
from graft.passes.library.streams.emit import apply_schedule
from graft.passes.library.streams.schedule import Tasks, list_schedule
from graft.passes.pipeline import run_pipeline
from marks import examples, short
from stream_modules import Branches, graph_of, placed
from stream_programs import agrees, disturbed, programs, scheduled

SLOW = settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))


def accepted(graph):
    try:
        check_streams(graph)
    except StreamOrderError:
        return False
    return True


# ── the proof, against every interleaving ───────────────────────────────────────────────────────────────────────


@SLOW
@given(scheduled())
def test_what_is_emitted_is_accepted_and_right(case):
    program, gm = case
    check_streams(gm.graph)
    assert agrees(program)


@SLOW
@given(scheduled())
def test_without_one_of_its_waits_it_is_refused(case):
    """What graft emits has no wait and no keep too many."""
    program, gm = case
    for node in [node for node in gm.graph.nodes if (stream_op(node) or ("",))[0] in ("wait", "keep")]:
        target, args, place = node.target, node.args, node.next
        gm.graph.erase_node(node)
        assert not accepted(gm.graph) and not agrees(program), (target, args)
        with gm.graph.inserting_before(place):
            gm.graph.call_function(target, args)
    check_streams(gm.graph)


def test_accepted_are_exactly_those_that_no_interleaving_tells_from_one_stream():
    verdicts = set()

    @SLOW
    @given(disturbed())
    def check(case):
        program, gm = case
        verdict = accepted(gm.graph)
        assert verdict == agrees(program)
        verdicts.add(verdict)

    check()
    assert verdicts == {True, False}  # the cases were of both kinds


# ── schedules ───────────────────────────────────────────────────────────────────────────────────────────────────


class Join(nn.Module):
    """With its second call on a side stream, `h` must be kept: the host drops it before that call has read it."""

    def forward(self, x):
        h = x * 2
        side = h + 1
        long = ((h * 3) + 5) * 7
        return side + long


class Chain(nn.Module):
    def forward(self, x):
        return (x * 2).relu() + 1


class Fixed:
    """Measures what it is told: microseconds for every call, and for the whole graph with and without streams."""

    def __init__(self, us=10.0, event_us=2.0, wholes=None):
        self.us, self.event_us, self.wholes = us, event_us, wholes

    def costs(self, gm):
        return Costs({node.name: self.us for node in gm.graph.nodes if on_device(node)}, self.event_us, "cpu")

    def whole(self, gm):
        return self.wholes[any(stream_op(node) for node in gm.graph.nodes)] if self.wholes else None


def schedule_of(gm, streams=2, **fixed):
    return list_schedule(gm.graph, Fixed(**fixed).costs(gm), streams)


@settings(SLOW, max_examples=examples(60))
@given(programs(), st.data())
def test_schedules_keep_every_order_and_no_stream_does_two_things_at_once(case, data):
    program, _ = case
    gm = GraphModule(torch.nn.Module(), program.graph)
    tasks = Tasks.of(gm.graph)
    costs = {node.name: data.draw(st.floats(0, 50)) for node in tasks.nodes}
    schedule = list_schedule(gm.graph, Costs(costs, data.draw(st.floats(0, 5)), "cpu"), data.draw(st.integers(2, 4)))
    slots = {slot.node: slot for slot in schedule.slots}
    assert slots.keys() == costs.keys()
    for node in tasks.nodes:
        assert all(slots[before.name].end <= slots[node.name].start + 1e-9 for before in tasks.after[node])
    for stream in set(schedule.stream.values()):
        mine = [slot for slot in schedule.slots if slot.stream == stream]
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(mine))
    assert schedule.path_us <= schedule.many_us + 1e-9
    assert schedule.one_us == pytest.approx(sum(costs.values()))
    apply_schedule(gm, schedule, "test")
    check_streams(gm.graph)


def test_branches_go_apart_and_chains_do_not():
    branches, chain = schedule_of(graph_of(Branches())), schedule_of(graph_of(Chain()))
    assert branches.streams == 2 and branches.many_us < branches.one_us
    assert branches.stream["linear"] != branches.stream["linear_1"]
    assert chain.streams == 1 and chain.path_us == chain.one_us == chain.many_us


def test_short_branches_stay_where_an_event_costs_more():
    assert schedule_of(graph_of(Branches()), event_us=100.0).streams == 1


def test_a_branch_that_saves_nothing_stays_on_the_callers_stream():
    class Uneven(nn.Module):
        """One wait for a side stream is paid for the long branch; the short one beside it would only add another."""

        def forward(self, x):
            return ((x * 2).relu().tanh() + (x + 3)) * ((x * 5).relu().tanh())

    gm = graph_of(Uneven())
    us = {node.name: 10.0 for node in gm.graph.nodes if on_device(node)} | {"add": 0.5}
    schedule = list_schedule(gm.graph, Costs(us, 2.0, "cpu"), 2)
    assert schedule.streams == 2 and schedule.stream["add"] == schedule.stream["tanh"]


def test_what_the_caller_gets_is_made_on_its_stream():
    class Two(nn.Module):
        def forward(self, x):
            return x.relu(), (x * 2).t()

    schedule = schedule_of(graph_of(Two()))
    assert set(schedule.stream.values()) == {0}


def test_random_numbers_are_drawn_in_their_order():
    class Noisy(nn.Module):
        def forward(self, x):
            return (x + torch.rand_like(x)).relu() + (x * torch.rand_like(x)).relu()

    gm = graph_of(Noisy())
    draws = [node for node in calls(gm.graph) if "rand" in node.name]
    after = Tasks.of(gm.graph).after
    assert draws[0] in after[draws[1]]


# ── the transform ───────────────────────────────────────────────────────────────────────────────────────────────


def streams_config(**options):
    """merge_gemms would make one layer of the two that Branches has."""
    return {"transforms": {"merge_gemms": {"enabled": False}, "schedule_streams": {"enabled": True, **options}}}


def run(gm, measure=None, **options):
    config = load_config(streams_config(**options))
    return run_pipeline(gm, config, Context(measure=measure)).transforms["schedule_streams"]


def pretend_gpu(monkeypatch):
    """The transform asks the recorded values for their device."""
    monkeypatch.setattr("graft.passes.library.streams.schedule_streams.on_gpu", lambda _: True)


def test_it_is_off_by_default_and_runs_last():
    from graft.passes.pipeline import order_transforms

    config = load_config()
    assert not config.transforms["schedule_streams"].enabled
    assert order_transforms(config)[-1] == "schedule_streams"


def test_skipped_with_reasons(monkeypatch):
    gm = graph_of(Branches())
    assert "on no GPU" in run(gm, Fixed()).reason
    assert "two or more" in run(gm, Fixed(), streams=1, force=True).reason
    assert "no costs" in run(gm, None, force=True).reason
    pretend_gpu(monkeypatch)
    record = run(gm, None, profile="some.json")
    assert record.status == "skipped" and "nobody measures the whole graph" in record.reason
    assert not any(stream_op(node) for node in gm.graph.nodes)


def test_no_branches_and_too_little_gain_are_said_with_numbers(monkeypatch):
    pretend_gpu(monkeypatch)
    assert run(graph_of(Chain()), Fixed()).reason == "no parallel branches: the longest path is all of it, 30.0 µs"
    assert "no branch is worth an event" in run(graph_of(Branches()), Fixed(event_us=100.0)).reason
    record = run(graph_of(Branches()), Fixed(), threshold=0.9)
    assert record.status == "no_match" and "predicted" in record.reason and "less than 90.0%" in record.reason


def test_taken_only_where_the_captured_graph_is_faster(monkeypatch):
    pretend_gpu(monkeypatch)
    gm = graph_of(Branches())
    before = graph_text(gm.graph)
    slower = run(gm, Fixed(wholes={False: 50.0, True: 51.0}))
    assert slower.status == "no_match"
    assert "not taken: measured 50.0 µs on one stream, 51.0 µs on several (-2.0%); predicted" in slower.reason
    assert graph_text(gm.graph) == before
    faster = run(gm, Fixed(wholes={False: 50.0, True: 40.0}))
    assert faster.status == "applied" and "taken: measured 50.0 µs" in faster.reason
    check_streams(gm.graph)


def test_what_the_checker_refuses_is_rolled_back(monkeypatch):
    def careless(gm, schedule, made_by):
        made = apply_schedule(gm, schedule, made_by)
        wait = next(node for node in made if is_op(node, WAIT))
        gm.graph.erase_node(wait)
        return [node for node in made if node is not wait]

    monkeypatch.setattr("graft.passes.library.streams.schedule_streams.apply_schedule", careless)
    gm = graph_of(Branches())
    before = graph_text(gm.graph)
    with pytest.raises(TransformError, match="does not wait for"):
        run(gm, Fixed(), force=True)
    assert graph_text(gm.graph) == before


def test_stream_ops_survive_cleanups_dumps_and_a_second_run():
    gm = placed(Join(), [0, 1, 0, 0, 0, 0])
    text = graph_text(gm.graph)
    assert "graft.stream_switch(1)" in text and "graft.stream_keep([" in text
    drop_dead(gm)
    canonicalize(gm)
    assert graph_text(gm.graph) == text
    loaded = graph_from_json(graph_to_json(gm, exact=True), dict(gm.state_dict()))
    assert graph_text(loaded.graph, origin=False) == graph_text(gm.graph, origin=False)
    check_streams(loaded.graph)
    assert "stream ops already" in run(gm, Fixed(), force=True).reason


def test_a_keep_reads_nothing():
    gm = placed(Join(), [0, 1, 0, 0, 0, 0])
    with gm.graph.inserting_before(next(node for node in gm.graph.nodes if is_op(node, KEEP))):
        last = gm.graph.call_function(torch.ops.aten.add_.Tensor, (next(calls(gm.graph)), 1))
    assert any(access.node is last for access in Uses.take(gm.graph).all())
    readers = {access.node for access in Uses.take(gm.graph).all()}
    assert not any(is_op(node, KEEP) for node in readers)


@torch.no_grad()
@pytest.mark.parametrize("backend", short(["eager", "inductor", "cuda_graph"], "eager", "cuda_graph"))
def test_on_a_cpu_they_do_nothing(backend):
    x, module = torch.randn(2, 8), Branches()
    expected = module(x)
    lowered = lower(scheduled_module(module), backend)
    got = lowered.call(x)
    torch.testing.assert_close(got[0] if isinstance(got, (list, tuple)) else got, expected)
    told = [*map(str, lowered.kernels.values()), *lowered.notes]
    assert any("one after another" in line or "stream ops are left out" in line for line in told)


def scheduled_module(module):
    gm = graph_of(module, torch.ones(2, 8))
    run(gm, Fixed(), force=True)
    return gm


def test_the_raw_graph_runs_too():
    x, module = torch.randn(2, 8), Branches()
    gm = scheduled_module(module)
    assert torch.equal(gm(x)[0] if isinstance(gm(x), (list, tuple)) else gm(x), module(x))


def test_compiled_modules_measure_and_leave_their_state(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path))
    module, x = Branches(), torch.randn(2, 8)
    compiled = graft.compile(module, (x,), config=streams_config(force=True), backend="eager")
    assert module.count.item() == 0
    (profile,) = (tmp_path / "profiles").glob("*.json")
    assert '"event_us"' in profile.read_text()
    with torch.no_grad():
        assert torch.equal(compiled(x), module(x))


# ── what the proof refuses, by name ─────────────────────────────────────────────────────────────────────────────


def test_both_nodes_and_the_edge_are_named():
    gm = placed(Branches(), [0, 0, 0, 0, 1, 1, 0])
    check_streams(gm.graph)
    waits = [node for node in gm.graph.nodes if is_op(node, WAIT)]
    gm.graph.erase_node(waits[-1])
    with pytest.raises(StreamOrderError) as caught:
        check_streams(gm.graph)
    text = str(caught.value)
    assert "%add (stream_modules.py" in text and "does not wait for %relu_1" in text and "it takes %relu_1" in text
    assert "on stream 1" in text and "record an event" in text


def test_memory_that_is_given_away_too_early_is_named():
    gm = placed(Join(), [0, 1, 0, 0, 0, 0])
    check_streams(gm.graph)
    gm.graph.erase_node(next(node for node in gm.graph.nodes if is_op(node, KEEP)))
    message = r"%add_1.* on stream 0 does not wait for %add .* on stream 1: it may get the memory of %mul"
    with pytest.raises(StreamOrderError, match=message):
        check_streams(gm.graph)


def test_results_of_a_side_stream_are_refused():
    gm = placed(Chain(), [0, 0, 1])
    with pytest.raises(StreamOrderError, match="run it on stream 0"):
        check_streams(gm.graph)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ([(WAIT, 7)], "waits for event 7, which is not recorded above it"),
        ([(RECORD, 1), (RECORD, 1)], "records event 1, which is recorded already"),
        ([(SWITCH, -1)], "streams count from 0"),
    ],
)
def test_stream_ops_without_sense_are_refused(ops, message):
    gm = graph_of(Chain())
    first = next(calls(gm.graph))
    for target, number in ops:
        with gm.graph.inserting_before(first):
            gm.graph.call_function(target, (number,)).meta["val"] = None
    with pytest.raises(VerificationError, match=message):
        check_streams(gm.graph)
