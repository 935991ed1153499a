"""The proof that a graph on several streams computes what it computes on one."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Graph, Node

from graft.base.errors import StreamOrderError
from graft.ir.effects import alias_sources, is_maybe_view
from graft.ir.nodes import output_node, where
from graft.ir.streams import in_memory_of, on_device, producers
from graft.memory.hazards import check_order
from graft.memory.timeline import MAIN, Timeline

ADD_EDGE = "record an event after the first and wait for it before the second"


@dataclass(frozen=True)
class Reuse:
    """`call` may get the memory of `owner`, which is free by then on the host, while `reader` still reads it."""

    owner: Node
    reader: Node
    call: Node


def check_streams(graph: Graph) -> Timeline:
    """Raises StreamOrderError, with both nodes and the edge that is missing, unless all of this is proven:

    1. Data: whoever takes a result, directly or through views, begins after the call that made it is over.
    2. Memory: every pair of reads and writes whose order matters (`state.hazards`) keeps it.
    3. Inputs: a side stream begins after the call has; the caller's stream sees all of it before the call returns.
    4. Lifetime: memory that the host gives back is not given away while another stream reads it (see `reuses`).
    5. Results are made on the caller's stream, whose allocator gets their memory back.
    """
    timeline = Timeline.of(graph)
    end = output_node(graph)
    for node in (*filter(on_device, graph.nodes), end):
        check_data(timeline, node)
    late = check_order(graph, timeline.before)
    if late:
        first, second, memory = late[0].first, late[0].second, late[0].memory
        raise missing(timeline, first, second, f"{late[0].kind} of %{memory.name}")
    for node in timeline.entry:
        if not timeline.begun(node):
            raise missing(timeline, "the beginning of the call", node, "its inputs may not be there yet")
        if not timeline.before(node, end):
            raise missing(timeline, node, end, "the call returns while it runs")
    for reuse in reuses(graph, timeline):
        problem = f"it may get the memory of %{reuse.owner.name}, which is free by then"
        fix = f"keep %{reuse.owner.name} with graft.stream_keep until the streams have met"
        raise StreamOrderError(described(timeline, reuse.reader), described(timeline, reuse.call), problem, fix)
    check_results(timeline, end)
    return timeline


def check_data(timeline: Timeline, node: Node) -> None:
    for value in node.all_input_nodes:
        for made in producers(value):
            if not timeline.before(made, node):
                raise missing(timeline, made, node, f"it takes %{value.name}")


def check_results(timeline: Timeline, end: Node) -> None:
    for node in allocations(timeline):
        if timeline.stream[node] != MAIN and any(end in member.users for member in in_memory_of(node)):
            fix = "run it on stream 0"
            problem = "a result in memory of a side stream is given back to that stream when the caller drops it"
            raise StreamOrderError(described(timeline, node), "the caller", problem, fix)


def allocations(timeline: Timeline) -> Iterator[Node]:
    """Calls whose results may be in new memory; what an in-place call returns is not."""
    for node in timeline.entry:
        if on_device(node) and (is_maybe_view(node) or not alias_sources(node)):
            yield node


def reuses(graph: Graph, timeline: Timeline) -> Iterator[Reuse]:
    """Memory that the allocator may give away too early.

    The allocator knows one stream of a block: the one that was current when it was allocated. When the host drops
    the last reference, the block is free for later calls on that stream at once, whatever other streams still do with
    it; in a capture too, where the order of the host decides which calls share memory in every replay. So, of the
    calls on that stream below the last use, the first must begin after every reader on another stream is over. Then
    so do all the others, and those of later calls, which begin after this one has ended (backends/streams.py).
    Kernels drop their own temporaries on the stream that they run on, where order is enough.
    """
    by_stream: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if on_device(node):
            by_stream.setdefault(timeline.stream[node], []).append(node)
    if len(by_stream) < 2:
        return
    for owner in allocations(timeline):
        home, members = timeline.stream[owner], in_memory_of(owner)
        users = {user for member in members for user in member.users}
        foreign = [user for user in users if user in timeline.entry and timeline.stream[user] != home]
        if not foreign or output_node(graph) in users:
            continue
        freed = max(timeline.position[node] for node in (*members, *users))
        later = bisect(by_stream[home], freed, key=timeline.position.__getitem__)
        call = by_stream[home][later] if later < len(by_stream[home]) else None
        for reader in sorted(foreign):
            if call is not None and not timeline.before(reader, call):
                yield Reuse(owner, reader, call)


def missing(timeline: Timeline, first: Node | str, second: Node, problem: str) -> StreamOrderError:
    early = first if isinstance(first, str) else described(timeline, first)
    return StreamOrderError(early, described(timeline, second), problem, ADD_EDGE)


def described(timeline: Timeline, node: Node) -> str:
    return f"{where(node)} on stream {timeline.stream[node]}"
