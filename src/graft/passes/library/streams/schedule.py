"""List scheduling: which call runs on which stream, from what each costs.

The calls are taken in a list, each after those that it depends on, and each goes to the stream where it ends first.
To follow a call of another stream costs an event, so a short branch stays where it is. Two lists are tried: the order
of the graph, and by the longest path to the end. What then saves nothing elsewhere goes back to stream 0. A
prediction knows nothing of kernels that slow each other down: whoever takes a schedule measures it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from torch.fx import Graph, Node

from graft.ir.canonical.normal_form import is_effect, is_random
from graft.ir.checks import reads_data
from graft.ir.effects import is_mutating
from graft.ir.nodes import module_path, output_node
from graft.ir.streams import in_memory_of, on_device, sources
from graft.memory.hazards import hazards
from graft.passes.costs import Costs

MOST_TRIALS = 64  # each costs a pass over the graph


@dataclass(frozen=True)
class ScheduledCall:
    """A call on a stream, from `start` for `us` microseconds."""

    node: str
    module: str
    stream: int
    start: float
    us: float

    @property
    def end(self) -> float:
        return self.start + self.us


@dataclass(frozen=True)
class Schedule:
    """Every call in the order in which it is issued, and the times that were predicted."""

    slots: tuple[ScheduledCall, ...]
    one_us: float  # on one stream
    many_us: float  # on these streams, joined at the end
    path_us: float  # the longest path: no number of streams is faster

    @property
    def gain(self) -> float:
        """The share of the time on one stream that is saved."""
        return 1 - self.many_us / self.one_us if self.one_us else 0.0

    @cached_property
    def stream(self) -> dict[str, int]:
        return {slot.node: slot.stream for slot in self.slots}

    @property
    def streams(self) -> int:
        return len(set(self.stream.values()))


@dataclass(frozen=True)
class Tasks:
    """The calls on the device, in graph order, what each must follow, and those that stay on stream 0."""

    nodes: tuple[Node, ...]
    after: Mapping[Node, set[Node]]
    pinned: frozenset[Node]

    @staticmethod
    def of(graph: Graph) -> Tasks:
        nodes = tuple(filter(on_device, graph.nodes))
        after = {node: sources(node) for node in nodes}
        for hazard in hazards(graph):
            if hazard.second in after and hazard.first in after:
                after[hazard.second].add(hazard.first)
        keep_host_order(nodes, after)
        return Tasks(nodes, after, frozenset(node for node in nodes if stays(node, output_node(graph))))

    def longest(self, costs: Mapping[str, float]) -> dict[Node, float]:
        """From the beginning of each call to the end of the graph, on the longest path."""
        found: dict[Node, float] = {}
        for node in reversed(self.nodes):
            found[node] = found.get(node, 0.0) + costs[node.name]
            for earlier in self.after[node]:
                found[earlier] = max(found.get(earlier, 0.0), found[node])
        return found


def keep_host_order(nodes: Sequence[Node], after: dict[Node, set[Node]]) -> None:
    """Random numbers are sampled in the order of the host; nothing is written before a check that stood above it."""
    sampled: Node | None = None
    check: Node | None = None
    writes: list[Node] = []
    for node in nodes:
        if is_random(node):
            after[node] |= {sampled} if sampled else set()
            sampled = node
        if is_effect(node):
            after[node] |= {*writes, *([check] if check else [])}
            check, writes = node, []
        elif is_mutating(node):
            after[node] |= {check} if check else set()
            writes.append(node)


def stays(node: Node, end: Node) -> bool:
    """What the host waits for, checks, and all memory that the caller gets belong to the caller's stream."""
    return is_effect(node) or reads_data(node) or any(end in member.users for member in in_memory_of(node))


def list_schedule(graph: Graph, costs: Costs, streams: int = 2) -> Schedule:
    tasks = Tasks.of(graph)
    longest = tasks.longest(costs.by_node)
    by_path = sorted(tasks.nodes, key=lambda node: -longest[node])  # stable: ties as in the graph
    one, path = sum(costs.by_node[node.name] for node in tasks.nodes), max(longest.values(), default=0.0)
    tried = [settle(order, tasks, costs, streams) for order in (tasks.nodes, by_path)]
    slots, many = min(tried, key=lambda assigned: assigned[1])
    return Schedule(tuple(slots), one, many, path)


def settle(order: Sequence[Node], tasks: Tasks, costs: Costs, streams: int) -> tuple[list[ScheduledCall], float]:
    """The list on its streams, and back on stream 0 whatever saves nothing elsewhere: there it needs no event."""
    slots, best = assign(order, tasks, costs, streams)
    for stretch in stretches(slots, order)[:MOST_TRIALS]:
        trial = replace(tasks, pinned=tasks.pinned | stretch)
        moved, us = assign(order, trial, costs, streams)
        if us <= best:
            tasks, slots, best = trial, moved, us
    return slots, best


def stretches(slots: Sequence[ScheduledCall], order: Sequence[Node]) -> list[frozenset[Node]]:
    """Calls that follow each other on a side stream and in the list, the cheapest stretch first."""
    runs = [list(run) for _, run in groupby(zip(slots, order, strict=True), key=lambda pair: pair[0].stream)]
    side = [run for run in runs if run[0][0].stream != 0]
    side.sort(key=lambda run: sum(slot.us for slot, _ in run))
    return [frozenset(node for _, node in run) for run in side]


def assign(order: Sequence[Node], tasks: Tasks, costs: Costs, streams: int) -> tuple[list[ScheduledCall], float]:
    """Each call where it ends first; the slots, and when all streams have met again."""
    free = [0.0] * streams  # when each stream is done with what it has
    used = {0}
    slots: dict[Node, ScheduledCall] = {}
    for node in order:
        us, best = costs.by_node[node.name], None
        earlier = [slots[before] for before in tasks.after[node]]
        for stream in (0,) if node in tasks.pinned else range(streams):
            start = earliest(stream, free[stream], stream in used, earlier, costs.event_us)
            slot = ScheduledCall(node.name, module_path(node), stream, start, us)
            best = slot if best is None or slot.end < best.end else best
        assert best is not None
        slots[node], free[best.stream] = best, best.end
        used.add(best.stream)
    joins = [free[stream] + costs.event_us for stream in used - {0}]
    return list(slots.values()), max([free[0], *joins])


def earliest(stream: int, free: float, used: bool, earlier: Sequence[ScheduledCall], event_us: float) -> float:
    """After all that it depends on; an event on top where it follows another stream, or begins a new one."""
    here = max([free, *(slot.end for slot in earlier if slot.stream == stream)])
    others = [slot.end for slot in earlier if slot.stream != stream]
    if not others and used:
        return here
    return max([here, *others]) + event_us
