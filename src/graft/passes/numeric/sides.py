"""The graph before and after a transform as pairs of pieces: what a match replaced, and what took its place.

Matches are independent: a value that another match replaced is an input here, the same on both sides. Every change of
the graph is covered; a node that reads something else without a match to account for it is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch
from torch.fx import GraphModule, Node, map_arg

from graft.base.errors import NumericCheckError
from graft.ir.canonical.normal_form import is_random
from graft.ir.edit import attribute
from graft.ir.effects import alias_sources, is_mutating
from graft.ir.evaluate import RecordedCall, Subprogram
from graft.ir.nodes import leaves, tensor_val, val, where
from graft.ir.verify import GraphSnapshot
from graft.passes.report import MatchRecord


@dataclass(frozen=True)
class Sides:
    """The graph before and after, and which node took the place of which."""

    gm: GraphModule
    state: Mapping[str, torch.Tensor]
    old: Mapping[Node, RecordedCall]
    new: Mapping[Node, RecordedCall]
    successors: Mapping[Node, Node]  # old node → what its readers read now
    owners: Mapping[Node, MatchRecord]  # old node with a successor → the match that replaced it
    # computed on both sides: what follows from sizes alone (a made-up arange would be no arange), and views (two of
    # one value, each made up for itself, would be strangers)
    computed: Set[Node]

    @staticmethod
    def of(gm: GraphModule, before: GraphSnapshot, records: Sequence[MatchRecord]) -> Sides:
        old = {
            node: RecordedCall(op, target, args, kwargs, i)
            for i, (node, _, op, target, args, kwargs, _) in enumerate(before.nodes)
        }
        new = {
            node: RecordedCall(node.op, node.target, node.args, node.kwargs, i)
            for i, node in enumerate(gm.graph.nodes)
        }
        names, present = {node.name: node for node in old}, {node.name: node for node in new}
        step = dict(pair for record in records for pair in record.successors)
        successors, owners = {}, {}
        for record in records:
            for name, _ in record.successors:
                last = name
                while last in step:
                    last = step[last]
                if name in names and last in present:
                    if name not in record.replaced:
                        raise NumericCheckError(f"{where(names[name])} was replaced by %{last}, but no match says so")
                    successors[names[name]] = present[last]
                    owners[names[name]] = record
        computed = {node for graph in (old, new) for node in (*fixed_values(graph), *views(graph))}
        return Sides(gm, before.state, old, new, successors, owners, computed)

    def check_rewiring(self) -> None:
        """Nodes that are in both graphs call what they called, on what took the place of what they read."""
        for node in self.old.keys() & self.new.keys():
            was, now = self.old[node], self.new[node]
            expected = [map_arg(given, lambda n: self.successors.get(n, n)) for given in (was.args, was.kwargs)]
            if was.target is not now.target or expected != [now.args, now.kwargs]:
                raise NumericCheckError(
                    f"{where(node)} was changed although no match replaced it, so nothing checks it"
                )

    def pieces(self, record: MatchRecord) -> tuple[Subprogram, Subprogram]:
        """The nodes that a match replaced, and those that took their place, cut at nodes that both graphs share."""
        inside = {*record.replaced, *(node.name for node in self.computed)}
        outputs = [node for node, owner in self.owners.items() if owner is record]
        others = {new for old, new in self.successors.items() if self.owners[old] is not record}

        def old_boundary(node: Node) -> Node | None:
            if node.name in inside:
                return None
            return self.successors.get(node) or (node if node in self.new and is_value(node) else None)

        def new_boundary(node: Node) -> Node | None:
            kept = node in self.old and node.name not in inside and is_value(node)
            return node if kept or node in others else None

        written = [
            tuple(writing(graph, names)) for graph, names in ((self.old, record.replaced), (self.new, record.made))
        ]
        old = Subprogram(tuple(outputs), self.old, self.state.__getitem__, old_boundary, written[0])
        successors = tuple(self.successors[node] for node in outputs)
        return old, Subprogram(successors, self.new, partial(attribute, self.gm), new_boundary, written[1])


def fixed_values(graph: Mapping[Node, RecordedCall]) -> set[Node]:
    """The tensors that a graph makes from numbers and sizes alone: masks, positions, angles."""
    fixed: set[Node] = set()
    for node, made in graph.items():
        sources = [leaf for leaf in leaves((made.args, made.kwargs)) if isinstance(leaf, Node)]
        settled = all(source in fixed or isinstance(val(source), (int, torch.SymInt)) for source in sources)
        if made.op == "call_function" and settled and tensor_val(node) is not None and not is_random(node):
            fixed.add(node)
    return fixed


def views(graph: Mapping[Node, RecordedCall]) -> set[Node]:
    return {node for node, made in graph.items() if made.op == "call_function" and alias_sources(node)}


def writing(graph: Iterable[Node], names: Collection[str] | None = None) -> Iterator[Node]:
    """The calls that write into memory, of those with these names."""
    return (node for node in graph if (names is None or node.name in names) and is_mutating(node))


def is_value(node: Node) -> bool:
    """Attributes are read from the module on each side; everything else can be an input of a check."""
    return node.op != "get_attr"
