"""A transform with some of its matches: the graph after it, in which the other sites are as they were before.

It needs nothing of the transform itself: the editor noted what took the place of what, and the matches own that. So
a wrong match can be searched for by halves, in any transform, of plugins too.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from graft.base.errors import VerificationError
from graft.ir.canonical.normal_form import drop_dead
from graft.ir.edit import attach_state
from graft.ir.effects import is_mutating
from graft.ir.evaluate import RecordedCall
from graft.ir.nodes import leaves, where
from graft.ir.verify import GraphSnapshot, module_state, verify
from graft.memory.verify import Uses, check_memory
from graft.passes.numeric.sides import Sides
from graft.passes.report import MatchRecord


def with_matches(
    gm: GraphModule, before: GraphSnapshot, records: Sequence[MatchRecord], kept: Collection[int], uses: Uses
) -> GraphModule:
    """Another module: `gm` with `records[i]` for i in `kept`, the other sites as in `before`. `gm` stays as it is.

    uses: the memory that the graph touched before the transform. What cannot be put together (a write would come
    before its read, a match that rests on another) is a VerificationError or a NumericCheckError.
    """
    graph = Mixer(Sides.of(gm, before, records), records, kept).graph(gm, before)
    root = torch.nn.Module()
    for name, tensor in (before.state | module_state(gm)).items():
        attach_state(root, name, tensor)
    mixed = GraphModule(root, graph)
    drop_dead(mixed)
    verify(mixed, before)
    check_memory(mixed, before, uses, [(records[index].replaced, records[index].made) for index in kept])
    mixed.recompile()
    return mixed


class Mixer:
    """Which node stands for which, where some matches are kept and the others are taken back."""

    def __init__(self, sides: Sides, records: Sequence[MatchRecord], kept: Collection[int]) -> None:
        self.sides = sides
        self.dropped = [record for index, record in enumerate(records) if index not in kept]
        gone = {id(record) for record in self.dropped}
        pairs = sides.successors.items()
        self.forward = {old: new for old, new in pairs if id(sides.owners[old]) not in gone}
        # a node that was there before keeps its readers, also where it took the place of another
        self.back = {new: old for old, new in pairs if id(sides.owners[old]) in gone and new not in sides.old}

    def read(self, node: Node) -> Node:
        """What a reader of `node` reads here."""
        return self.forward.get(node) or self.back.get(node) or node

    def call(self, node: Node) -> RecordedCall:
        """A node of both graphs calls what it called before; its arguments are looked up again."""
        return self.sides.old[node] if node in self.sides.old else self.sides.new[node]

    def graph(self, gm: GraphModule, before: GraphSnapshot) -> Graph:
        """Every node that the output needs or that writes, in an order that both graphs agree with."""
        made: dict[Node, Node] = {}
        graph, ranks = Graph(), order(self.sides)
        metas = {node: meta for node, *_, meta in before.nodes}
        for node in sorted(self.needed(), key=ranks.__getitem__):
            self.emit(node, graph, made, metas)
        graph.set_codegen(copy.copy(gm.graph._codegen))
        return graph

    def needed(self) -> set[Node]:
        """From the output upwards, and from every input and every write that is there."""
        made = {name for record in self.dropped for name in record.made}
        replaced = {name for record in self.dropped for name in record.replaced}
        waiting = [
            node
            for node in self.sides.new
            if node.op in ("output", "placeholder") or (is_mutating(node) and node.name not in made)
        ]
        waiting += [node for node in self.sides.old if node.name in replaced and is_mutating(node)]
        found: set[Node] = set()
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += self.sources(node)
        return found

    def sources(self, node: Node) -> list[Node]:
        call = self.call(node)
        return [self.read(leaf) for leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, Node)]

    def emit(self, node: Node, graph: Graph, made: dict[Node, Node], metas: Mapping[Node, dict[str, Any]]) -> None:
        """The node, after what it reads."""
        stack, entered = [node], set()
        while stack:
            here = stack[-1]
            missing = [source for source in self.sources(here) if source not in made]
            if here in made:
                stack.pop()
            elif any(source in entered for source in missing):
                raise VerificationError(f"{where(here)} rests on another match, so it cannot be taken back by itself")
            elif missing:
                entered.add(here)
                stack += missing
            else:
                call = self.call(here)
                args, kwargs = (map_arg(given, lambda n: made[self.read(n)]) for given in (call.args, call.kwargs))
                made[here] = graph.create_node(
                    call.op, call.target, args, kwargs, name=here.name, type_expr=here.type
                )
                made[here].meta = dict(metas.get(here, here.meta))
                stack.pop()


def order(sides: Sides) -> dict[Node, tuple[float, int]]:
    """Where a node stands: nodes of both graphs as before, a new one just above the next of those."""
    ranks: dict[Node, tuple[float, int]] = {node: (index, 0) for index, node in enumerate(sides.old)}
    position = float(len(ranks))
    for index, node in reversed(list(enumerate(sides.new))):
        if node in sides.old:
            position = ranks[node][0]
        else:
            ranks[node] = (position - 0.5, index)
    return ranks
