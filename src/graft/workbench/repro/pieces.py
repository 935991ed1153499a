"""What a match replaced and what it made, each as a small graph of the same inputs, cut out of two dumped graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from graft.base.errors import ReproRefused
from graft.ir.evaluate import RecordedCall, example_size
from graft.ir.nodes import leaves, tensor_val, val, where
from graft.ir.subgraph import Cutter, reached
from graft.passes.numeric.sides import fixed_values, views
from graft.passes.report import MatchRecord


@dataclass(frozen=True)
class ReproSide:
    """One graph of a run."""

    gm: GraphModule

    @cached_property
    def nodes(self) -> dict[str, Node]:
        return {node.name: node for node in self.gm.graph.nodes}

    @cached_property
    def computed(self) -> set[Node]:
        """Computed on both sides: what follows from sizes alone, and views of one value, which must stay related."""
        called = {n: RecordedCall(n.op, n.target, n.args, n.kwargs, i) for i, n in enumerate(self.gm.graph.nodes)}
        return {*fixed_values(called), *views(called)}

    def results(self, names: Iterable[str]) -> list[Node]:
        """Those of the named calls that something else reads, in the order of the graph; sizes are numbers here."""
        inside = {self.nodes[name] for name in names if name in self.nodes}
        read = [n for n in self.gm.graph.nodes if n in inside and any(user not in inside for user in n.users)]
        return [n for n in read if not is_size(n)]


@dataclass(frozen=True)
class Cut:
    """Two modules that take the same inputs. `inputs`: what they are in the first graph."""

    inputs: tuple[Node, ...]
    original: GraphModule
    replacement: GraphModule
    made_weights: tuple[str, ...]  # weights that the transform made: what they hold follows from others


def cut(before: GraphModule, after: GraphModule, records: Sequence[MatchRecord], index: int) -> Cut:
    """The match with this index. Values that other matches replaced are inputs, the same for both."""
    old, new = ReproSide(before), ReproSide(after)
    pairs = {record: paired(old, new, record) for record in records}
    here = records[index]
    if not pairs[here]:
        raise ReproRefused(f"the match at {here.anchor} replaced nothing that the graph reads")
    # what stands in the second graph for a value of the first
    known = {o.name: n.name for pair in pairs.values() for o, n in pair.items()}
    back = {n: o for o, n in known.items()}
    own = {o.name for o in pairs[here]}
    first = GraphSlice.of(old, list(pairs[here]), {*here.replaced})
    second = GraphSlice.of(new, list(pairs[here].values()), {*here.made} | {known[name] for name in own})
    names = {n: n.name for n in first.inputs}
    for node in second.inputs:
        names[node] = back.get(node.name, node.name)
    made_weights = [n for n in second.inputs if names[n] not in old.nodes]
    strange = next((n for n in made_weights if n.op != "get_attr"), None)
    if strange is not None:
        raise ReproRefused(
            f"{where(strange)} is read by what was made, and nothing in the graph before stands for it"
        )
    shared = dict.fromkeys(names.values())
    nodes = tuple(old.nodes.get(name) or new.nodes[name] for name in shared)
    order = {node.name: node for node in nodes}
    return Cut(
        nodes,
        first.module(order, names),
        second.module(order, names),
        tuple(str(n.target) for n in made_weights),
    )


def paired(old: ReproSide, new: ReproSide, record: MatchRecord) -> dict[Node, Node]:
    """The results of a match in the first graph, and what stands for each in the second: what its readers read now;
    where they are gone too, those that are left, in order and of the same kind."""
    found: dict[Node, Node] = {}
    results = old.results(record.replaced)
    for node in results:
        for user in node.users:
            reader = new.nodes.get(user.name)
            if user.name not in record.replaced and reader is not None and reader.target is user.target:
                positions = zip(leaves((user.args, user.kwargs)), leaves((reader.args, reader.kwargs)), strict=True)
                found[node] = next(there for here, there in positions if here is node)
    left = [node for node in results if node not in found]
    offered = [n for n in new.results(record.made) if n not in found.values()]
    for node in left:
        alike = next((n for n in offered if kind(n) == kind(node)), None)
        if alike is None:
            raise ReproRefused(f"what stands for {where(node)} after the transform cannot be told from the dump")
        offered.remove(alike)
        found[node] = alike
    return found


def kind(node: Node) -> str:
    return str(node.meta.get("value_text"))


@dataclass(frozen=True)
class GraphSlice:
    """The calls that compute `outputs`, and what they read from outside."""

    calls: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]

    @staticmethod
    def of(side: ReproSide, outputs: list[Node], inside: set[str]) -> GraphSlice:
        """Sizes are no inputs: they stand as numbers."""

        def is_inside(node: Node) -> bool:
            return node.op == "call_function" and (node.name in inside or node in side.computed)

        def reads(node: Node) -> list[Node]:
            return [n for n in node.all_input_nodes if not is_size(n)] if is_inside(node) else []

        in_order = sorted(reached([n for n in outputs if not is_size(n)], reads))
        calls, inputs = ([n for n in in_order if is_inside(n) is kept] for kept in (True, False))
        return GraphSlice(tuple(calls), tuple(inputs), tuple(outputs))

    def module(self, order: Mapping[str, Node], names: Mapping[Node, str]) -> GraphModule:
        """Every input of `order` is an argument, whether it is read here or not."""
        cutter, weights = Cutter(), 0
        for name, node in order.items():
            weights += node.op == "get_attr"
            plain = f"weight_{weights}".removesuffix("_1") if node.op == "get_attr" else name
            stands_for = [one for one in self.inputs if names[one] == name]
            cutter.input(plain, {"val": val(node), "node": name}, *stands_for)
        for node in self.calls:
            made = cutter.call(node, concrete)
            made.meta = {"val": val(node)}
            cutter.copies[node] = for_cpu(made)
        return cutter.module(self.outputs)


def for_cpu(node: Node) -> Node:
    """A graph captured for another device may count whole numbers by histc, which the CPU does for floats alone."""
    made = tensor_val(node)
    if node.target is not torch.ops.aten.histc.default or made is None or made.is_floating_point():
        return node
    graph, to = node.graph, torch.ops.aten.to.dtype
    with graph.inserting_before(node):
        counted = graph.call_function(to, (node.args[0], torch.float64))
    node.args = (counted, *node.args[1:])
    with graph.inserting_after(node):
        whole = graph.call_function(to, (node, made.dtype))
    whole.meta = {"val": made}
    return whole


def is_size(node: Node) -> bool:
    return isinstance(val(node), (int, torch.SymInt))


def concrete(value: Any) -> Any:
    """Sizes as the numbers of the example, devices as the CPU, everywhere."""

    def plain(item: Any) -> Any:
        if isinstance(item, Node) and is_size(item):
            return example_size(val(item), item)
        return torch.device("cpu") if isinstance(item, torch.device) else item

    return map_aggregate(value, plain)


def shape_of(node: Node) -> list[int]:
    value = tensor_val(node)
    if value is None:
        raise ReproRefused(f"{where(node)} has no recorded shape, so no input can be made; dump the model again")
    return [example_size(size, node) for size in value.shape]
