"""Which nodes of a graph may share memory, and who reads it after a given node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graft.ir.edit import abstract_call
from graft.ir.effects import address, alias_sources, is_hold, is_maybe_view, is_mutating, storage_root, with_views
from graft.ir.nodes import is_op, leaves, outlives_call, tensor_val, val
from graft.ir.storage import storage_id
from graft.ir.streams import SIZES
from graft.memory.regions import disjoint

aten = torch.ops.aten


@dataclass(frozen=True)
class Read:
    """`reader` takes data from a memory through `through`, a view of it or its owner."""

    reader: Node
    through: Node

    def text(self) -> str:
        returned = self.reader.op == "output"
        return f"%{self.through.name} is returned" if returned else f"%{self.reader.name} reads %{self.through.name}"


def storages(value: object) -> set[int]:
    """The storages of a recorded value; several for a call with several results."""
    found = {storage_id(item) for item in leaves(value) if isinstance(item, torch.Tensor)}
    return {item for item in found if item is not None}


def refresh_views(nodes: Iterable[Node]) -> None:
    """Recomputes the recorded values of views whose source was exchanged, so that storages tell the truth again."""
    for node in nodes:
        sources = alias_sources(node)
        if not sources or is_mutating(node) or node.meta.get("val") is None:
            continue
        known = set().union(*(storages(val(source)) for source in sources))
        if known and not storages(val(node)) <= known:
            node.meta["val"] = abstract_call(node)


def sharing(graph: Graph, nodes: Iterable[Node]) -> list[Node]:
    """What may share memory with one of `nodes`, sources before their views."""
    found = dict.fromkeys(storage_root(node) for node in nodes)
    if graph.owning_module is not None and any(node.op == "get_attr" for node in found):
        memory = {address(graph, node) for node in found if node.op == "get_attr"}
        attributes = (node for node in graph.nodes if node.op == "get_attr")
        found |= dict.fromkeys(node for node in attributes if address(graph, node) in memory)
    return with_views(found)


class Aliases:
    """Groups of nodes that may share memory.

    Two nodes are in one group when a chain of views joins them. With `trusted`, recorded FakeTensors count too: nodes
    of one storage are joined, and `reshape` and its like are views only where the storage says so. Values that are
    shared between calls (ir/edit.py does that) must not be trusted. Attributes in one memory are one group. With
    `within`, only what shares memory with these nodes is looked at.
    """

    def __init__(self, graph: Graph, *, trusted: bool = False, within: Iterable[Node] | None = None) -> None:
        self.trusted = trusted
        self._group: dict[Node, list[Node]] = {}
        self._owner: dict[int, Node] = {}  # storage -> a node of it
        self._attribute: dict[int, Node] = {}  # address -> an attribute there
        self._graph = graph
        for node in graph.nodes if within is None else sharing(graph, within):
            self.add(node)

    def add(self, node: Node) -> None:
        """Takes in a node that was made after the graph was read."""
        self._group[node] = [node]
        for source in self.sources(node):
            self.join(source, node)
        if node.op == "get_attr" and self._graph.owning_module is not None:
            self.join(self._attribute.setdefault(address(self._graph, node), node), node)
        tensor = tensor_val(node) if self.trusted else None  # several results are not one memory
        storage = storage_id(tensor) if tensor is not None else None
        if storage is not None:
            self.join(self._owner.setdefault(storage, node), node)

    def sources(self, node: Node) -> list[Node]:
        """What `node` is a view of, or may be."""
        sources = alias_sources(node)
        if self.trusted and is_maybe_view(node) and tensor_val(node) is not None:
            return [source for source in sources if storages(val(source)) & storages(val(node))]
        return sources

    def join(self, left: Node, right: Node) -> None:
        """From now on the two share memory."""
        small, large = sorted((self.group(left), self.group(right)), key=len)
        if small is not large:
            large += small
            for node in small:
                self._group[node] = large

    def forget(self, node: Node) -> None:
        """Drops a node that is erased from the graph."""
        group = self._group.pop(node)
        group.remove(node)
        for storage in storages(val(node)):
            if self._owner.get(storage) is node:
                self._owner.pop(storage)
                if group:
                    self._owner[storage] = group[0]

    def __contains__(self, node: Node) -> bool:
        return node in self._group

    def group(self, node: Node) -> list[Node]:
        """All that may share memory with `node`, itself included."""
        return self._group[node]

    def same(self, left: Node, right: Node) -> bool:
        return self._group.get(left) is self._group.get(right) is not None

    def may_alias(self, left: Node, right: Node) -> bool:
        """False when the two are in different memory, or proven to cover different parts of one."""
        if not self.same(left, right):
            return False
        a, b = tensor_val(left), tensor_val(right)
        return not (self.trusted and a is not None and b is not None and disjoint(a, b))

    def inputs(self, node: Node) -> list[Node]:
        """Graph inputs and constants in whose memory `node` may be."""
        return sorted(n for n in self.group(node) if outlives_call(n))

    def is_read(self, user: Node, value: Node) -> bool:
        """True when `user` takes data from `value`, rather than making a view, asking its size, or overwriting it."""
        if is_op(user, *SIZES) or is_hold(user) or getattr(user.target, "gives_number", False):
            return False
        if is_op(user, aten.copy_.default) and user.args[0] is value:
            return user.args[1] is value
        if value in self.sources(user) and not is_mutating(user):
            return is_maybe_view(user) and not self.trusted
        return True

    def reads(self, value: Node, after: Node, before: Node | None = None) -> list[Read]:
        """Who reads the memory of `value` after `after` (and before `before`), in graph order.

        In a functional graph, with `after` about to write `value` in place, these are the reads of the old value.
        """
        found = [
            Read(user, member)
            for member in self.group(value)
            for user in member.users
            if after < user and (before is None or user < before) and self.is_read(user, member)
        ]
        return sorted(found, key=lambda read: read.reader)
