"""Connected regions of nodes that can become one call each, grown in graph order.

A region may have several results. What makes it legal is a position: after everything that it reads and before
everyone outside who reads from it. Where there is such a position, no path can leave the region and come back, since
it would have to run backward in the graph; so regions are convex by construction, and nothing else has to move.
Growing by one node looks at the region's own edges alone, and regions are limited in size: the cost is linear in the
graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from graft.ir.effects import mutated_args
from graft.ir.nodes import where
from graft.ir.patterns.match import NearMiss
from graft.ir.subgraph import inputs_of, outputs_of
from graft.memory.aliases import Aliases

MAX_NODES, MAX_INPUTS = 64, 16


@dataclass(eq=False)
class FusibleRegion:
    """Nodes in graph order, and where their one call would stand, in positions of the graph (halves are between)."""

    nodes: list[Node]
    position: float

    @property
    def anchor(self) -> Node:
        return self.nodes[-1]

    def inputs(self) -> list[Node]:
        return inputs_of(self.nodes)

    def outputs(self) -> list[Node]:
        return outputs_of(self.nodes)


@dataclass
class Grower:
    """Grows regions of the nodes in `keys`; two neighbours join where their keys are equal."""

    graph: Graph
    keys: Mapping[Node, Hashable]
    name: str
    order: dict[Node, int] = field(default_factory=dict)
    region: dict[Node, FusibleRegion] = field(default_factory=dict)
    misses: list[NearMiss] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.order = {node: index for index, node in enumerate(self.graph.nodes)}
        self.inputs_end = max((i for n, i in self.order.items() if n.op == "placeholder"), default=-1)
        writes = [(node, argument) for node in self.graph.nodes for argument in mutated_args(node)]
        self.aliases = Aliases(self.graph, within=[argument for _, argument in writes])
        self.writes: dict[int, list[int]] = {}  # memory → positions of its writers
        for node, argument in writes:
            self.writes.setdefault(id(self.aliases.group(argument)), []).append(self.order[node])

    def grow(self) -> list[FusibleRegion]:
        """All regions of two nodes or more, in the order in which their calls stand."""
        for node in self.graph.nodes:
            if node in self.keys:
                self.add(node)
        found = dict.fromkeys(region for region in self.region.values() if len(region.nodes) > 1)
        return sorted(found, key=lambda region: region.position)

    def add(self, node: Node) -> None:
        """Joins `node` with as many of the regions that it reads as there is a position for."""
        current = self.region[node] = FusibleRegion([node], self.order[node])
        read = [self.region[a] for a in node.all_input_nodes if self.keys.get(a) == self.keys[node]]
        for region in sorted(dict.fromkeys(read), key=lambda r: r.position, reverse=True):
            joined = self.join(region, current)
            if isinstance(joined, str):
                size = len(region.nodes) + len(current.nodes)
                miss = f"{where(node)} stays apart from {where(region.nodes[-1])}: {joined}"
                self.misses.append(NearMiss.at(self.name, node, node, miss, len(current.nodes), size))
            else:
                current = joined
                self.region |= dict.fromkeys(joined.nodes, joined)

    def join(self, left: FusibleRegion, right: FusibleRegion) -> FusibleRegion | str:
        """Both as one region, or why not."""
        joined = FusibleRegion(sorted([*left.nodes, *right.nodes], key=self.order.__getitem__), 0.0)
        if len(joined.nodes) > MAX_NODES:
            return f"a region has at most {MAX_NODES} ops"
        if len(joined.inputs()) > MAX_INPUTS:
            return f"a region has at most {MAX_INPUTS} inputs"
        position = self.find_position(joined, (left.position, right.position))
        if isinstance(position, str):
            return position
        joined.position = position
        return joined

    def find_position(self, joined: FusibleRegion, wished: Sequence[float]) -> float | str:
        """A wished position where it fits, else one between the last input and the first reader, else the reason."""
        inside = set(joined.nodes)
        readers = [user for node in joined.nodes for user in node.users if user not in inside]
        last = max(joined.inputs(), key=self.position_of, default=None)
        first = min(readers, key=self.position_of, default=None)
        low = max(self.position_of(last), self.inputs_end) if last is not None else self.inputs_end
        high = self.position_of(first) if first is not None else float(len(self.order))
        if low >= high and last is not None and first is not None:
            return f"{where(first)} reads from it before {where(last)}, which it needs, is computed"
        problem = ""
        for position in (*wished, (low + high) / 2):
            if low < position < high:
                problem = self.write_problem(joined, position)
                if problem is None:
                    return position
        return problem or "no position is left between its inputs and its readers"

    def write_problem(self, joined: FusibleRegion, position: float) -> str | None:
        """An input that is written in place must be read at `position` as it was where the node stood."""
        if not self.writes:
            return None
        inside = set(joined.nodes)
        for node in joined.nodes:
            for argument in (a for a in node.all_input_nodes if a in self.aliases and a not in inside):
                written = self.writes.get(id(self.aliases.group(argument)))
                # a call at the position of some node stands above it
                if written and bisect_left(written, self.order[node]) != bisect_left(written, position):
                    return f"{where(argument)} is written in place between {where(node)} and the rest"
        return None

    def position_of(self, node: Node) -> float:
        region = self.region.get(node)
        return region.position if region is not None else self.order[node]
