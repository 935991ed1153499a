"""A part of a graph: what its calls read from outside, what of them is read outside; and as a graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg


def inputs_of(nodes: Iterable[Node]) -> list[Node]:
    """What the nodes read from outside, in the order of first use."""
    nodes = list(nodes)
    inside = set(nodes)
    return list(dict.fromkeys(read for node in nodes for read in node.all_input_nodes if read not in inside))


def outputs_of(nodes: Iterable[Node]) -> list[Node]:
    """Those of the nodes that something outside reads."""
    nodes = list(nodes)
    inside = set(nodes)
    return [node for node in nodes if any(user not in inside for user in node.users)]


def reached(outputs: Iterable[Node], reads: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """The outputs and all that is behind them; `reads` says what to look at behind a node: nothing at a border."""
    found: set[Node] = set()
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += reads(node)
    return found


@dataclass
class Cutter:
    """Writes a part of a graph as a module. First its inputs, each by a name of its own, then its calls in order."""

    graph: Graph = field(default_factory=Graph)
    copies: dict[Node, Node] = field(default_factory=dict)

    def input(self, name: str, meta: dict[str, Any], *stands_for: Node) -> Node:
        made = self.graph.placeholder(name)
        made.meta = meta
        self.copies.update(dict.fromkeys(stands_for, made))
        return made

    def call(self, node: Node, arguments: Callable[[Any], Any] | None = None) -> Node:
        """The same call on the copies, with all that is recorded of it. `arguments` is laid over what it is given,
        and may put numbers in place of nodes that were not copied."""
        if arguments is None:
            made = self.graph.node_copy(node, self.copies.__getitem__)
        else:
            args, kwargs = (map_arg(given, lambda n: self.copies.get(n, n)) for given in (node.args, node.kwargs))
            made = self.graph.create_node(node.op, node.target, arguments(args), arguments(kwargs), name=node.name)
            made.meta = dict(node.meta)
        self.copies[node] = made
        return made

    def module(self, outputs: Sequence[Node]) -> GraphModule:
        """With the results as a tuple, unless there is one."""
        results = [self.copies[node] for node in outputs]
        self.graph.output(results[0] if len(results) == 1 else tuple(results))
        return GraphModule(torch.nn.Module(), self.graph)
