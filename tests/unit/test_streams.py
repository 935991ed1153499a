"""Streams: schedules from costs, stream ops in a graph, and the proof that nobody sees another order (R44)."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from stream_programs import agrees, disturbed, scheduled

from graft.errors import StreamOrderError
from graft.graph.streams import stream_op
from graft.state.streams import check_streams

SLOW = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def accepted(graph):
    try:
        check_streams(graph)
    except StreamOrderError:
        return False
    return True


# ── the proof, against every interleaving ───────────────────────────────────────────────────────────────────────


@SLOW
@given(scheduled())
def test_what_is_emitted_is_accepted_and_right_r44(case):
    program, gm = case
    check_streams(gm.graph)
    assert agrees(program)


@SLOW
@given(scheduled())
def test_without_one_of_its_waits_it_is_refused_r44(case):
    """What graft emits has no wait and no keep too many."""
    program, gm = case
    for node in [node for node in gm.graph.nodes if (stream_op(node) or ("",))[0] in ("wait", "keep")]:
        target, args, place = node.target, node.args, node.next
        gm.graph.erase_node(node)
        assert not accepted(gm.graph) and not agrees(program), (target, args)
        with gm.graph.inserting_before(place):
            gm.graph.call_function(target, args)
    check_streams(gm.graph)


def test_accepted_are_exactly_those_that_no_interleaving_tells_from_one_stream_r44():
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
