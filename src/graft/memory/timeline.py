"""What is over before what, in a graph whose calls run on several streams.

Calls of one stream run one after another. `stream_record` marks how far its stream has come; after `stream_wait` of
that event a stream knows all that the other knew at the mark. What each stream knows is a vector clock: for every
stream, how many of its entries are over. `first` happens before `second` where the clock of `second`, as it begins,
counts `first`.

An entry is a call on the device or a wait on a side stream (a stream that waits and is never waited for leaves a
capture unfinished). Entry 1 of stream 0 is the beginning of the call: whoever counts it sees the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Graph, Node

from graft.base.errors import VerificationError
from graft.ir.nodes import output_node, where
from graft.ir.streams import on_device, stream_op

Clock = dict[int, int]  # stream → entries that are over
MAIN = 0


@dataclass(frozen=True)
class Timeline:
    position: dict[Node, int] = field(default_factory=dict)  # of every node in the graph
    stream: dict[Node, int] = field(default_factory=dict)  # of entries and the output
    entry: dict[Node, int] = field(default_factory=dict)
    knows: dict[Node, Clock] = field(default_factory=dict)  # as the entry begins

    @staticmethod
    def of(graph: Graph) -> Timeline:
        """Raises VerificationError for stream ops without sense: an event that is not there yet, or there twice."""
        timeline = Timeline()
        clocks: dict[int, Clock] = {MAIN: {MAIN: 1}}
        events: dict[int, Clock] = {}
        current = MAIN
        for position, node in enumerate(graph.nodes):
            timeline.position[node] = position
            kind, number = stream_op(node) or ("", 0)
            clock = clocks.setdefault(current, {})
            if kind == "switch":
                if number < 0:
                    raise VerificationError(f"{where(node)} switches to stream {number}; streams count from 0")
                current = number
            elif kind == "record":
                if number in events:
                    raise VerificationError(f"{where(node)} records event {number}, which is recorded already")
                events[number] = dict(clock)
            elif kind == "wait":
                if number not in events:
                    raise VerificationError(f"{where(node)} waits for event {number}, which is not recorded above it")
                merge(clock, events[number])
                if current != MAIN:
                    timeline.add(node, current, clock)
            elif on_device(node):
                timeline.add(node, current, clock)
        end = output_node(graph)
        timeline.stream[end], timeline.knows[end] = MAIN, dict(clocks[MAIN])
        return timeline

    def add(self, node: Node, stream: int, clock: Clock) -> None:
        self.stream[node], self.knows[node] = stream, dict(clock)
        self.entry[node] = clock[stream] = clock.get(stream, 0) + 1

    def before(self, first: Node, second: Node) -> bool:
        """`first` is over when `second` begins. What does not run on the device is over at once."""
        if first not in self.entry or second not in self.knows:
            return True
        return self.knows[second].get(self.stream[first], 0) >= self.entry[first]

    def begun(self, node: Node) -> bool:
        """`node` begins after the call does."""
        return self.knows[node].get(MAIN, 0) > 0


def merge(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)
