"""Timelines: as a Chrome trace, which Perfetto opens (ui.perfetto.dev), and as text.

One row a stream, one slice a call with its module and cost. A predicted schedule draws without a GPU; what torch's
profiler saw on one is drawn in the same form.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from graft.base.files import write_whole
from graft.base.timers import profile_events
from graft.passes.library.streams.schedule import Schedule, ScheduledCall

WIDTH = 72  # characters of a row of text
NANOSECONDS = 1e3  # in a microsecond, the unit of the format


def extent(begin: int, end: int) -> dict[str, float]:
    """Where a slice lies, from whole nanoseconds: slices that nest or follow one another do so exactly, which sums of
    floats do not. Readers of the format count in nanoseconds too: `round(1000 * ts)` is `begin` again."""
    return {"ts": begin / NANOSECONDS, "dur": (end - begin) / NANOSECONDS}


def trace_events(slots: Iterable[ScheduledCall], process: str, pid: int = 0) -> list[dict[str, Any]]:
    """Events of the Trace Event Format, times in microseconds: names of the rows, then a complete event a call."""
    slots = list(slots)
    events: list[dict[str, Any]] = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}}]
    for stream in sorted({slot.stream for slot in slots}):
        for name, value in (
            ("thread_name", {"name": f"stream {stream}"}),
            ("thread_sort_index", {"sort_index": stream}),
        ):
            events.append({"ph": "M", "pid": pid, "tid": stream, "name": name, "args": value})
    for slot in slots:
        where = extent(round(slot.start * NANOSECONDS), round(slot.end * NANOSECONDS))
        event = {"ph": "X", "pid": pid, "tid": slot.stream, "name": slot.node, **where}
        events.append({**event, "cat": slot.module or "graph", "args": {"module": slot.module, "us": slot.us}})
    return events


def write_trace(path: Path, rows: Sequence[tuple[str, Sequence[ScheduledCall]]]) -> None:
    """A file with one process for each (name, slots)."""
    events = [event for pid, (name, slots) in enumerate(rows) for event in trace_events(slots, name, pid)]
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


def one_stream(schedule: Schedule) -> tuple[ScheduledCall, ...]:
    """The same calls one after another."""
    slots, at = [], 0.0
    for slot in schedule.slots:
        slots.append(ScheduledCall(slot.node, slot.module, 0, at, slot.us))
        at += slot.us
    return tuple(slots)


def gantt(slots: Sequence[ScheduledCall], width: int = WIDTH) -> list[str]:
    """A row of text for each stream; a call is drawn over its share of the time, at least one character."""
    if not slots:
        return []
    end = max(slot.end for slot in slots) or 1.0
    lines = []
    for stream in sorted({slot.stream for slot in slots}):
        row = ["·"] * width
        for slot in (slot for slot in slots if slot.stream == stream):
            left = min(int(slot.start / end * width), width - 1)
            size = max(min(round(slot.us / end * width), width - left), 1)
            text = slot.node[: size - 2] if size > 2 else ""
            row[left : left + size] = list("[" + text.ljust(size - 2, "═") + "]") if size > 1 else ["|"]
        busy = sum(slot.us for slot in slots if slot.stream == stream)
        lines.append(f"stream {stream} {''.join(row)} {busy:8.1f} µs busy")
    lines.append(f"{'':9}{'0':<{width - 12}}{end:9.1f} µs")
    return lines


def profiled_slots(profile: torch.profiler.profile, device_index: int = 0) -> tuple[ScheduledCall, ...]:
    """The kernels that torch's profiler saw, each in the first row that is free of others.

    The stream that it reports for the kernels of a CUDA graph may be the one of the launch, whatever they ran on.
    """
    events = sorted(kernel_events(profile, device_index), key=lambda event: event["ts"])
    start = float(events[0]["ts"]) if events else 0.0
    ends: list[int] = []  # nanoseconds: of the last kernel in each row
    found = []
    for event in events:
        at, taken = (round(float(us) * NANOSECONDS) for us in (event["ts"] - start, event["dur"]))
        row = next((index for index, end in enumerate(ends) if end <= at), len(ends))
        ends[row : row + 1] = [at + taken]
        found.append(ScheduledCall(event["name"], "", row, at / NANOSECONDS, taken / NANOSECONDS))
    return tuple(found)


def kernel_events(profile: torch.profiler.profile, device_index: int) -> list[dict[str, Any]]:
    return [
        e
        for e in profile_events(profile)
        if e.get("cat") == "kernel" and e.get("args", {}).get("device", 0) == device_index
    ]


def overlap(slots: Sequence[ScheduledCall]) -> dict[str, Any]:
    """How much runs at once: the sum of all kernels over the time in which one runs at least; each stream's share."""
    busy: dict[int, float] = {}
    for slot in slots:
        busy[slot.stream] = busy.get(slot.stream, 0.0) + slot.us
    covered, end = 0.0, float("-inf")
    for slot in sorted(slots, key=lambda slot: slot.start):
        covered += max(slot.end - max(slot.start, end), 0.0)
        end = max(end, slot.end)
    total = sum(busy.values())
    wall = max((s.end for s in slots), default=0.0) - min((s.start for s in slots), default=0.0)
    return {
        "kernel_us": total,
        "covered_us": covered,
        "wall_us": wall,
        "at_once": total / covered if covered else 0.0,
        "busy_by_stream": {str(stream): us / wall if wall else 0.0 for stream, us in sorted(busy.items())},
    }
