"""The phases of a start, from what its progress reports."""

from __future__ import annotations

import pytest

from graft.base.progress import CAPTURE, LOWERING, TRANSFORMS, Doing, phase_of
from graft.bench import phases
from graft.bench.phases import PhaseClock


def test_reports_become_phases_with_seconds(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now[0])
    told: list[str] = []
    clock = PhaseClock(lambda what, done, total: told.append(what))
    assert clock.phases() == {} and clock.since(CAPTURE) == 0.0
    for what, until in (
        (Doing("capturing the graph", CAPTURE), 2.0),
        (Doing("transform fuse_rope", TRANSFORMS), 2.5),
        (Doing("transform merge_qkv", TRANSFORMS), 3.0),
        (Doing("transforms done", LOWERING), 4.0),
        (Doing("capturing batch 1", "CUDA graphs"), 4.5),
        (Doing("capturing batch 64", "CUDA graphs"), 6.0),
    ):
        clock(what, 0, 1)
        now[0] = until
    assert clock.phases() == {
        CAPTURE: 2.0,
        TRANSFORMS: 1.0,
        LOWERING: 1.0,
        "CUDA graphs": 2.0,
    }
    assert clock.since("transforms") == pytest.approx(4.0) and len(told) == 6
    clock.mark("first token")
    now[0] = 7.0
    assert clock.phases()["first token"] == 1.0


def test_a_report_carries_its_phase_and_reads_as_its_words():
    doing = Doing("transform fuse_rope", TRANSFORMS)
    assert phase_of(doing) == TRANSFORMS and f"{doing}" == "transform fuse_rope" == doing
    assert phase_of("timing candidates") == "timing candidates"


def test_a_start_counts_from_a_stored_graph_too(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now[0])
    clock = PhaseClock()
    clock(Doing("loading the captured graph", CAPTURE), 0, 1)
    now[0] = 3.0
    clock(Doing("transform fuse_rope", TRANSFORMS), 0, 1)
    assert clock.since(CAPTURE) == 3.0
