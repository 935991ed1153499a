"""A run as a trace (ui.perfetto.dev): the pipeline, and the calls of a graph as they were predicted or timed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

from graft.base.errors import ExportRefused, UsageError
from graft.ir.nodes import calls, module_path
from graft.models.places import resolve_device
from graft.passes.library.streams.schedule import ScheduledCall
from graft.passes.report import Report, TransformRecord
from graft.workbench.discover.calls import is_free
from graft.workbench.discover.savings import Machine, call_bytes, sizes_for
from graft.workbench.export.inputs import made_up_arguments, needs_layout
from graft.workbench.trace import NANOSECONDS, extent, profiled_slots, trace_events

SECOND = 1e9  # nanoseconds
WARM_UP = 2


def pipeline_events(report: Report, pid: int = 0) -> list[dict[str, Any]]:
    """One slice a transform, one after another as they ran, with the matches it made; what it spent its time on is
    nested. Transforms that were off have no slice."""
    name = f"pipeline of {report.model or 'a graph'}"
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": pid, "tid": 0, "name": "thread_name", "args": {"name": "transforms"}},
    ]
    at = 0
    for record in report.transforms.values():
        if record.status == "disabled":
            continue
        events += record_events(record, at, pid)
        at += round(record.seconds * SECOND)
        nodes = {"nodes": record.nodes_after}
        events.append({"ph": "C", "pid": pid, "name": "nodes", "ts": at / NANOSECONDS, "args": nodes})
    return events


def record_events(record: TransformRecord, begin: int, pid: int) -> list[dict[str, Any]]:
    common = {"ph": "X", "pid": pid, "tid": 0, "cat": record.stage}
    checked = [match.numeric_check for match in record.matches if match.numeric_check is not None]
    args: dict[str, Any] = {
        "status": record.status,
        "matches": len(record.matches),
        "near_misses": len(record.near_misses),
        "nodes_before": record.nodes_before,
        "nodes_after": record.nodes_after,
        "checked_numerically": len(checked),
    }
    args |= {"reason": record.reason} if record.reason else {}
    end = begin + round(record.seconds * SECOND)
    events = [{**common, "name": record.name, **extent(begin, end), "args": args}]
    # the snapshot comes first; what is left after each phase, counted from the end, keeps all of them inside
    left = list(accumulate((seconds for _, seconds in reversed(record.phases)), initial=0.0))[::-1]
    cuts = [max(end - round(seconds * SECOND), begin) for seconds in left]
    for (phase, _), (first, last) in zip(record.phases, pairwise(cuts), strict=True):
        told = {"matches": [match.anchor for match in record.matches]} if phase == "rewrite" else {}
        events.append({**common, "name": phase, **extent(first, last), "args": told})
    return events


def predicted_slots(gm: GraphModule, tokens: int, machine: Machine) -> tuple[ScheduledCall, ...]:
    """The calls of a step one after another, as long as their bytes and launches take by the model of `discover`."""
    sizes, at, slots = sizes_for(gm.graph, tokens), 0.0, []
    for node in calls(gm.graph):
        if not is_free(node):
            us = machine.microseconds(1, call_bytes(node, sizes))
            slots.append(ScheduledCall(node.name, module_path(node), 0, at, us))
            at += us
    return tuple(slots)


def on_device(gm: GraphModule, device: torch.device) -> GraphModule:
    """With its weights, and the tensors that it makes itself, on a device."""
    for node in calls(gm.graph):
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), lambda v: at(v, device))
    gm.recompile()
    return gm.to(device)


def at(value: Any, device: torch.device) -> Any:
    return device if isinstance(value, torch.device) else value


class Timed(Interpreter):
    """Runs a graph call by call and notes when each began and ended, in microseconds."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.slots: list[ScheduledCall] = []
        self.began = time.perf_counter_ns()

    def run_node(self, n: Node) -> Any:
        started = time.perf_counter_ns()
        result = super().run_node(n)
        ended = time.perf_counter_ns()
        if n.op == "call_function":
            at, us = (started - self.began) / NANOSECONDS, (ended - started) / NANOSECONDS
            self.slots.append(ScheduledCall(n.name, module_path(n), 0, at, us))
        return result


def timed_slots(gm: GraphModule, shapes: GraphModule, device: str = "cpu") -> tuple[ScheduledCall, ...]:
    """The calls of one run after a warm-up: by the clock on a CPU, by torch's profiler on a GPU. `shapes`: the same
    graph with its abstract values, from which inputs are made up."""
    reason = needs_layout(gm)
    if reason:
        raise ExportRefused(
            f"the graph cannot be timed on made-up inputs: {reason}; choose an earlier one with --step"
        )
    target = resolve_device(device)
    if target.type == "meta":
        raise UsageError("--device meta computes nothing that could be timed; use cpu or cuda")
    args = [t.to(target) for t in made_up_arguments(shapes)]
    moved = on_device(gm, target)
    with torch.no_grad():
        for _ in range(WARM_UP):
            moved(*args)
        if target.type == "cuda":
            with torch.profiler.profile() as profile:
                moved(*args)
                torch.cuda.synchronize()
            return profiled_slots(profile)
        timed = Timed(moved)
        timed.run(*args)
    return tuple(timed.slots)


def trace_document(report: Report, rows: Iterable[tuple[str, Sequence[ScheduledCall]]]) -> dict[str, Any]:
    """The pipeline as the first process, then one process for each (name, calls)."""
    events = pipeline_events(report)
    for pid, (name, slots) in enumerate(rows, 1):
        events += trace_events(slots, name, pid)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
