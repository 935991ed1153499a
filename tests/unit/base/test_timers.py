"""The timers: what they call, what they count, and that nobody has others."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graft
from graft.base import timers


class Clock:
    """Time goes on by what is asked for, and not otherwise."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def work(self, seconds):
        pending = iter(seconds)

        def call():
            self.now += next(pending)

        return call


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=9), st.integers(1, 4), st.integers(0, 3))
def test_calls_are_clocked_one_by_one_and_warm_ups_do_not_count(times, in_a_row, warm_up):
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timers, "time", clock)
        calls = [99.0] * (warm_up * in_a_row) + [one for one in times for _ in range(in_a_row)]
        found = timers.clocked(clock.work(calls), len(times), in_a_row=in_a_row, warm_up=warm_up)
    assert found == pytest.approx(times)


def test_a_call_on_a_cpu_is_the_median_of_the_repeats(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timers, "time", clock)
    assert timers.call_seconds(clock.work([50.0, 1.0, 9.0, 2.0]), torch.device("cpu"), 3) == pytest.approx(2.0)


class Event:
    """Of a device that takes two milliseconds for a replay."""

    replayed = 0

    def record(self) -> None:
        self.at = Event.replayed

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end) -> float:
        return 2.0 * (end.at - self.at)


def test_replays_are_timed_between_events(monkeypatch):
    monkeypatch.setattr(timers, "event_pair", lambda: (Event(), Event()))

    def replay():
        Event.replayed += 1

    assert timers.replay_seconds(replay, 4, replays=5, warm_up=2) == pytest.approx(0.002)
    assert Event.replayed == (4 + 2) * 5


def test_nobody_else_makes_timing_events():
    root = Path(graft.__file__).parent
    own = {root / "base/timers.py", root / "engine" / "decode" / "arrival.py"}  # there the engine times itself
    files = set(root.rglob("*.py"))
    naming = {path for path in files if "enable_timing" in path.read_text()}
    assert own & naming
    for path in naming - own:
        made = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        assert not any(keyword.arg == "enable_timing" for call in made for keyword in call.keywords), path
