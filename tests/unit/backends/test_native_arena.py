"""The arena and the barriers of any program: no two live buffers overlap, and who depends on whom waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graft.backends.native.arena import barriers, clash, first_gap, lay_out, lifetimes, touched
from graft.backends.native.program import Buffer, HeadLayout, KernelCall, NativeKernel, Pointer, Value


def value(name: str, width: int) -> Value:
    return Value(name, HeadLayout("tokens", 1, width, "flat"), 0, width)


@st.composite
def programs(draw) -> tuple[list[KernelCall], list[Buffer]]:
    """Step i writes buffer i and reads some of those before it."""
    widths = draw(st.lists(st.sampled_from([16, 32, 48, 160]), min_size=1, max_size=12))
    steps = []
    for index, width in enumerate(widths):
        sources = draw(st.lists(st.integers(0, index - 1), max_size=3)) if index else []
        fields = [(f"x{i}", Pointer(value(f"b{s}", widths[s]))) for i, s in enumerate(sources)]
        steps.append(
            KernelCall(NativeKernel("k", "A", "h"), (*fields, ("out", value(f"b{index}", width))), f"n{index}", "")
        )
    return steps, [Buffer(f"b{index}", "tokens", width, width) for index, width in enumerate(widths)]


@given(programs())
def test_live_buffers_do_not_overlap(program):
    steps, buffers = program
    places, widths, _ = lay_out(steps, buffers, {})
    lives = lifetimes(steps)
    for a in buffers:
        assert places[a.name].offset + a.width <= widths["tokens"]
        for b in buffers:
            together = lives[a.name][0] <= lives[b.name][1] and lives[b.name][0] <= lives[a.name][1]
            apart = places[a.name].offset + a.width <= places[b.name].offset
            apart = apart or places[b.name].offset + b.width <= places[a.name].offset
            assert a is b or not together or apart
    assert widths["tokens"] <= sum(buffer.width for buffer in buffers)


@given(programs())
def test_a_step_waits_for_what_it_depends_on_and_only_then(program):
    steps, buffers = program
    named = {buffer.name: buffer for buffer in buffers}
    places, _, found = lay_out(steps, buffers, {})
    memory = [touched(step, named, places) for step in steps]

    def depends(early: int, late: int) -> bool:
        (reads, writes), (later_reads, later_writes) = memory[early], memory[late]
        return clash(later_writes, [*reads, *writes]) or clash(later_reads, writes)

    for late in range(len(steps)):
        for early in range(late):
            assert not depends(early, late) or any(early < barrier <= late for barrier in found)
    for barrier in found:  # each is there for a reason
        start = max((other for other in found if other < barrier), default=0)
        assert any(depends(early, barrier) for early in range(start, barrier))


def test_independent_steps_run_together():
    steps = [KernelCall(NativeKernel("k", "A", "h"), (("out", value(f"b{i}", 16)),), f"n{i}", "") for i in range(3)]
    steps.append(
        KernelCall(NativeKernel("k", "A", "h"), tuple((f"x{i}", value(f"b{i}", 16)) for i in range(3)), "sum", "")
    )
    buffers = [Buffer(f"b{i}", "tokens", 16, 16) for i in range(3)]
    places, _, found = lay_out(steps, buffers, {})
    assert found == {3}
    assert barriers(steps[:3], {b.name: b for b in buffers}, places) == frozenset()


def test_a_gap_that_is_wide_enough_is_taken():
    assert first_gap([(0, 16), (48, 64)], 32) == 16
    assert first_gap([(0, 16), (32, 64)], 32) == 64
    assert first_gap([], 16) == 0
