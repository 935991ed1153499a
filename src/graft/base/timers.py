"""How long a call takes, in seconds: on a CPU by the clock, on a GPU by its own events.

clocked         each of some calls by the clock, the first of which warms up
cpu_seconds     the median of those
ColdTimer       one call on a GPU that finds nothing in the cache, issued while the device is busy
replay_seconds  a replay of a CUDA graph
graph_seconds   one call of several in a row inside a CUDA graph: launches cost what they cost in a decode step
call_seconds    cpu_seconds or graph_seconds, as the device asks
replay_times, graph_times, call_times: all the times that those are the medians of
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Work = Callable[[], Any]
REPEATS = 15
FLUSH_BYTES = 256 << 20  # several times the 60 MB of a large second-level cache
PASS_SECONDS, MOST_PASSES = 1e-4, 30  # an H200 reads and writes it in 0.13 ms


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clocked(work: Work, repeats: int, *, in_a_row: int = 1, warm_up: int = 1) -> list[float]:
    """Seconds of one call, as many times as `repeats`; those that warm up do not count."""
    times = []
    for _ in range(warm_up + repeats):
        started = time.perf_counter()
        for _ in range(in_a_row):
            work()
        times.append((time.perf_counter() - started) / in_a_row)
    return times[warm_up:]


def cpu_seconds(work: Work, repeats: int = REPEATS, *, in_a_row: int = 1) -> float:
    return statistics.median(clocked(work, repeats, in_a_row=in_a_row))


def profile_events(profile: torch.profiler.profile) -> list[dict[str, Any]]:
    """The events of the profiler's own trace: its Python events tell neither stream nor grid."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def replay_seconds(replay: Work, repeats: int = REPEATS, *, replays: int = 1, warm_up: int = 3) -> float:
    return statistics.median(replay_times(replay, repeats, replays=replays, warm_up=warm_up))


def replay_times(replay: Work, repeats: int = REPEATS, *, replays: int = 1, warm_up: int = 3) -> list[float]:
    """Of one replay, in stretches of `replays` on the current stream, by the device's events."""
    times = []
    for _ in range(warm_up + repeats):
        begin, end = event_pair()
        begin.record()
        for _ in range(replays):
            replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / replays)
    return times[warm_up:]


def graph_seconds(work: Work, device: torch.device, repeats: int = REPEATS, *, in_a_row: int = 1) -> float:
    return statistics.median(graph_times(work, device, repeats, in_a_row=in_a_row))


def graph_times(work: Work, device: torch.device, repeats: int = REPEATS, *, in_a_row: int = 1) -> list[float]:
    """One of `in_a_row` calls that are one CUDA graph."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()  # compiles and sets up outside of the capture
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(in_a_row):
                work()
        return [time / in_a_row for time in replay_times(graph.replay, repeats)]


def call_seconds(work: Work, device: torch.device, repeats: int = REPEATS, *, in_a_row: int = 1) -> float:
    return statistics.median(call_times(work, device, repeats, in_a_row=in_a_row))


def call_times(work: Work, device: torch.device, repeats: int = REPEATS, *, in_a_row: int = 1) -> list[float]:
    if device.type == "cuda":
        return graph_times(work, device, repeats, in_a_row=in_a_row)
    return clocked(work, repeats, in_a_row=in_a_row)


class ColdTimer:
    """Calls on a GPU between two events, with passes over a large buffer ahead of each: a kernel finds its weights in
    memory rather than in the cache, and the host is ahead of the device. What an empty pair takes is subtracted."""

    def __init__(self, device: torch.device, repeats: int = REPEATS) -> None:
        self.device, self.repeats, self.empty = device, repeats, 0.0
        self.flush = torch.zeros(FLUSH_BYTES // 4, device=device)
        self.empty = self(lambda: None)

    def __call__(self, work: Work) -> float:
        with torch.cuda.device(self.device):
            for _ in range(2):  # compiles and tunes
                work()
            passes = self.passes(work)
            pairs = [self.pair(work, passes) for _ in range(self.repeats)]
            torch.cuda.synchronize(self.device)
        taken = statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3
        return max(taken - self.empty, 0.0)

    def passes(self, work: Work) -> int:
        """How often to pass over the buffer so that the device is busy while the host issues the call."""
        torch.cuda.synchronize(self.device)
        (issued,) = clocked(work, 1, warm_up=0)
        return min(1 + round(2 * issued / PASS_SECONDS), MOST_PASSES)

    def pair(self, work: Work, passes: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = event_pair()
        for _ in range(passes):
            self.flush.add_(1)
        begin.record()
        work()
        end.record()
        return begin, end
