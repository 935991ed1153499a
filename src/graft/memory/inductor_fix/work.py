"""A graph while its writes are put back: the functional calls in it, and what was done so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from graft.ir.nodes import is_op, output_node, tensor_val, val
from graft.memory.aliases import Aliases
from graft.memory.inductor_fix.moves import copy_node, lift, lift_plan, opaque_copy
from graft.memory.inductor_fix.report import FunctionalizationReport, KeptCopy, MovedRead, RestoredCall
from graft.memory.regions import same_layout

aten = torch.ops.aten
FUNCTIONAL = (torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2)
# what Inductor's reinplace_inplaceable_ops may write in place (argument 0), and the view through which it then writes
INPLACEABLE: dict[Any, Any] = {
    aten.index_put.default: None,
    aten._unsafe_index_put.default: None,
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.as_strided_scatter.default: aten.as_strided.default,
    aten.diagonal_scatter.default: aten.diagonal.default,
}


@dataclass(frozen=True)
class View:
    """An argument that is written through a view of a base: `target(base, *args)`, or the base itself.

    torch counts offsets, and starts and ends of slices too, from the start of the storage, in which the base itself
    began at `origin`: not 0 where an input is a view (`f(x[1:])`). For a slice, `origin` is in steps of its dim.
    """

    base: int
    target: Any = None
    args: tuple[Any, ...] = ()
    origin: Any = 0  # a number, maybe symbolic

    def numbers(self, base: torch.Tensor) -> tuple[Any, ...]:
        """The arguments as numbers, for a base that lies where `base` does."""
        args = map_arg(self.args, val)
        if self.target is aten.as_strided.default:
            size, stride, offset = args
            return size, stride, offset - self.origin + base.storage_offset()
        if self.target is aten.slice.Tensor:
            dim, *ends = args
            return dim, *(end - self.origin for end in ends)
        return args

    def of(self, base: torch.Tensor) -> torch.Tensor:
        return base if self.target is None else self.target(base, *self.numbers(base))


@dataclass(frozen=True)
class FunctionalCall:
    """`auto_functionalized` taken apart: `op(**arguments)` overwrites `bases`, and the graph goes on with copies."""

    node: Node
    op: Any
    arguments: dict[str, Any]  # a View in place of every written argument
    bases: tuple[Node, ...]
    positions: tuple[int, ...]  # where the new value of each base is among the node's results
    eager: dict[str, Any] | None = None  # the abstract arguments as eager saw them
    found: dict[Any, Any] = field(default_factory=dict)  # sizes that the op finds when it runs: symbol → where

    def results(self, base: int) -> list[Node]:
        return [user for user in self.node.users if user.args[1] == self.positions[base]]


@dataclass
class GraphWork:
    """One graph while it is rewritten, and what was done so far."""

    graph: Graph
    aliases: Aliases
    settle: Callable[[Any], Any]  # put in front of a write: who reads the old value later has it by then
    offset_of: Callable[..., Any]  # where a view starts, as a call in the graph (offsets.py)
    restored: list[RestoredCall] = field(default_factory=list)
    kept: list[KeptCopy] = field(default_factory=list)
    protected: list[KeptCopy] = field(default_factory=list)
    moved: list[MovedRead] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)

    def report(self) -> FunctionalizationReport:
        names = tuple(call.node for call in self.restored)
        copies = tuple(self.kept), tuple(self.protected)
        return FunctionalizationReport(names, *copies, tuple(self.moved), tuple(self.left), tuple(self.restored))

    def copy(self, value: Node, before: Node, *, any_layout: bool = False, opaque: bool = False) -> Node | None:
        first = before.prev
        if opaque:
            copied = opaque_copy(self.graph, value, before=before)
        else:
            copied = copy_node(self.graph, value, before=before, any_layout=any_layout)
        while (first := first.next) is not before:
            self.aliases.add(first)
        return copied

    def protect(self, value: Node, before: Node, by: Node, reason: str) -> None:
        """Returns a copy of `value`, taken above `before`."""
        if before is value:
            before = value.next
        lift(lift_plan([value], before)[0], before)
        copied = self.copy(value, before, any_layout=True)
        output_node(self.graph).replace_input_with(value, copied)
        self.protected.append(KeptCopy.of(by.name, str(by.target), value, reason))


def write_back(value: Node) -> Node | None:
    """The `copy_` at the end of the graph through which the caller sees a graph input change."""
    found = [user for user in value.users if is_op(user, aten.copy_.default) and user.args[0] is value]
    return found[0] if len(found) == 1 else None


def same_nodes(left: Node, right: Node) -> bool:
    """Both are tensors of one layout."""
    a, b = tensor_val(left), tensor_val(right)
    return a is not None and b is not None and same_layout(a, b)


def functional_results(node: Node) -> bool:
    """All users take one result, so that each can be replaced."""
    return all(is_op(user, getitem) for user in node.users)
