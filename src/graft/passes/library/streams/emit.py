"""Writes a schedule into a graph: its order, switches between streams, events, and what must be kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import getitem

from torch.fx import Graph, GraphModule, Node

from graft.ir.edit import Editor
from graft.ir.nodes import output_node
from graft.ir.streams import on_device
from graft.memory.stream_hazards import reuses
from graft.memory.timeline import MAIN, Clock, Timeline, merge
from graft.ops.streams import KEEP, RECORD, SWITCH, WAIT
from graft.passes.library.streams.schedule import Schedule, Tasks

BEGIN = 0  # the event of the beginning of the call


def apply_schedule(gm: GraphModule, schedule: Schedule, made_by: str) -> list[Node]:
    """Rewrites the graph and gives the stream ops. No call, operand or name changes."""
    tasks = Tasks.of(gm.graph)
    named = {node.name: node for node in tasks.nodes}
    order = [named[slot.node] for slot in schedule.slots]
    events = plan_events(order, tasks, schedule.stream)
    reorder(gm.graph, order)
    made = insert_ops(gm, order, schedule.stream, events, made_by)
    return made + keep_memory(gm, made_by)


@dataclass(frozen=True)
class Events:
    """Event numbers by the call that they are recorded after, and the events that a call, or the end, waits for."""

    recorded: dict[Node, int] = field(default_factory=dict)
    awaited: dict[Node, list[int]] = field(default_factory=dict)
    at_end: list[int] = field(default_factory=list)

    def number(self, node: Node) -> int:
        return self.recorded.setdefault(node, BEGIN + 1 + len(self.recorded))


def plan_events(order: Sequence[Node], tasks: Tasks, stream_of: dict[str, int]) -> Events:
    """As few waits as the clocks of the streams allow: what a stream knows already is not waited for again."""
    events = Events()
    clocks: dict[int, Clock] = {MAIN: {MAIN: 1}}
    position = {node: index for index, node in enumerate(order)}
    entry: dict[Node, int] = {}
    after: dict[Node, Clock] = {}  # what the stream knew when the call was over
    last: dict[int, Node] = {}

    def wait_for(stream: int, needed: Iterable[Node]) -> list[int]:
        numbers, clock = [], clocks[stream]
        for node in sorted(needed, key=position.__getitem__, reverse=True):  # the latest may know of the others
            if clock.get(stream_of[node.name], 0) < entry[node]:
                numbers.append(events.number(node))
                merge(clock, after[node])
        return numbers

    for node in order:
        stream = stream_of[node.name]
        fresh = stream not in clocks
        clock = clocks.setdefault(stream, {})
        numbers = wait_for(stream, tasks.after[node])
        if fresh and not numbers:
            numbers = [BEGIN]
            merge(clock, {MAIN: 1})
        events.awaited[node] = numbers
        entry[node] = clock[stream] = clock.get(stream, 0) + 1
        after[node], last[stream] = dict(clock), node
    events.at_end.extend(wait_for(MAIN, (node for stream, node in last.items() if stream != MAIN)))
    return events


def reorder(graph: Graph, order: Sequence[Node]) -> None:
    """The calls in the given order, each with the views and sizes that it takes right above it."""
    end = output_node(graph)
    moved: set[Node] = {node for node in graph.nodes if node.op == "placeholder"}

    def move(node: Node) -> None:
        if node not in moved:
            moved.add(node)
            for value in node.all_input_nodes:
                if not on_device(value):
                    move(value)
            end.prepend(node)

    rest = [node for node in graph.nodes if not on_device(node) and node is not end]
    for node in order:
        move(node)
    for node in rest:  # what the output alone takes
        move(node)


def insert_ops(
    gm: GraphModule, order: Sequence[Node], stream_of: dict[str, int], events: Events, made_by: str
) -> list[Node]:
    editor, made, current = Editor(gm, made_by), [], MAIN
    if any(BEGIN in numbers for numbers in events.awaited.values()):
        made.append(editor.call(RECORD, (BEGIN,), before=order[0], like=order[0]))

    def switch(stream: int, before: Node, like: Node) -> None:
        nonlocal current
        if stream != current:
            made.append(editor.call(SWITCH, (stream,), before=before, like=like))
            current = stream

    for node in order:
        switch(stream_of[node.name], node, node)
        for number in events.awaited[node]:
            made.append(editor.call(WAIT, (number,), before=node, like=node))
        if node in events.recorded:
            made.append(editor.call(RECORD, (events.recorded[node],), before=node.next, like=node))
    end, last = output_node(gm.graph), order[-1]
    switch(MAIN, end, last)
    for number in events.at_end:
        made.append(editor.call(WAIT, (number,), before=end, like=last))
    return made


def keep_memory(gm: GraphModule, made_by: str) -> list[Node]:
    """Keeps what the allocator might give away too early (`state.streams.reuses`) until its stream knows the readers.

    That is: until the first call on the stream of the memory that begins after all of its readers, or the end.
    """
    graph = gm.graph
    timeline = Timeline.of(graph)
    readers: dict[Node, list[Node]] = {}
    for reuse in reuses(graph, timeline):
        readers.setdefault(reuse.owner, []).append(reuse.reader)
    until: dict[Node, list[Node]] = {}
    for owner, late in readers.items():
        home = timeline.stream[owner]
        calls = (n for n in graph.nodes if on_device(n) and timeline.stream[n] == home)
        point = next((n for n in calls if all(timeline.before(r, n) for r in late)), output_node(graph))
        until.setdefault(point, []).append(owner)
    editor = Editor(gm, made_by)
    return [
        editor.call(KEEP, ([t for o in owners for t in tensors(o)],), before=point, like=owners[0])
        for point, owners in until.items()
    ]


def tensors(owner: Node) -> list[Node]:
    """The results of a call: itself, or the items of several that are used."""
    items = [user for user in owner.users if user.target is getitem]
    return items or [owner]
