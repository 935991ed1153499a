"""The phases of a start, from what its progress reports."""

from __future__ import annotations

import pytest

from graft.workbench import phases
from graft.workbench.phases import AFTER_TRANSFORMS, STARTS, PhaseClock, phase_of


def test_reports_become_phases_with_seconds(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now[0])
    told: list[str] = []
    clock = PhaseClock(lambda what, done, total: told.append(what))
    assert clock.phases() == {} and clock.since(*STARTS) == 0.0
    for what, until in (
        ("capturing the graph", 2.0),
        ("transform fuse_rope", 2.5),
        ("transform merge_qkv", 3.0),
        ("transforms done", 4.0),
        ("recording batch 1", 4.5),
        ("recording batch 64", 6.0),
    ):
        clock(what, 0, 1)
        now[0] = until
    assert clock.phases() == {
        "capturing the graph": 2.0,
        "transforms": 1.0,
        AFTER_TRANSFORMS: 1.0,
        "recording batch": 2.0,
    }
    assert clock.since("transforms") == pytest.approx(4.0) and len(told) == 6
    clock.mark("first token")
    now[0] = 7.0
    assert clock.phases()["first token"] == 1.0


def test_numbers_do_not_tell_phases_apart():
    assert phase_of("recording batch 64 of 1,024") == phase_of("recording batch 1 of 8") == "recording batch of"
    assert phase_of("transform fuse_rope") == "transforms" != phase_of("transforms done")


def test_a_start_counts_from_a_stored_graph_too(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now[0])
    clock = PhaseClock()
    clock("loading the captured graph", 0, 1)
    now[0] = 3.0
    clock("transform fuse_rope", 0, 1)
    assert clock.since(*STARTS) == 3.0
