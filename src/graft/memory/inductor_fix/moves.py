"""Moving pure calls up a functional graph, and copying values: the two ways to save an old value from a write."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from graft.ir.canonical.normal_form import is_random
from graft.ir.edit import INHERITED, abstract_call
from graft.ir.effects import is_mutating
from graft.ir.nodes import OpOverload, same_sizes, static_int, tensor_of

aten = torch.ops.aten


def is_pure(node: Node) -> bool:
    """Depends on its arguments alone and changes nothing, so that its position in a functional graph is free."""
    if node.op != "call_function" or is_mutating(node) or node.is_impure():
        return False
    if isinstance(node.target, OpOverload):
        return not is_random(node)
    if getattr(node.target, "gives_number", False):
        return True
    return getattr(operator, getattr(node.target, "__name__", ""), None) is node.target  # getitem, sums of sizes


def lift_plan(readers: Iterable[Node], position: Node) -> tuple[list[Node], Node | None]:
    """The nodes to move above `position` so that all `readers` stand there, in order; and the first that cannot
    move."""
    plan: dict[Node, None] = {}
    stack = [(reader, False) for reader in readers]
    while stack:
        node, ready = stack.pop()
        if ready:
            plan[node] = None
        elif node is position or (position < node and not is_pure(node)):
            return [], node
        elif position < node and node not in plan:
            stack.append((node, True))
            stack += [(source, False) for source in node.all_input_nodes]
    return list(plan), None


def lift(plan: Iterable[Node], position: Node) -> None:
    for node in plan:
        position.prepend(node)


def insert(graph: Graph, target: Any, args: tuple[Any, ...], *, before: Node, like: Node) -> Node:
    """A new call with its abstract value (its own, so that storages stay true) and the origin of `like`."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
    node.meta = {key: like.meta[key] for key in INHERITED if key in like.meta}
    node.meta["val"] = abstract_call(node)
    return node


def keeps_strides(value: Node) -> bool:
    """`clone` gives the same strides: the value is dense."""
    tensor = tensor_of(value)
    return same_sizes(torch.empty_like(tensor).stride(), tensor.stride())


def keeps_layout(value: Node) -> bool:
    """`clone` gives the same strides and offset: the value is dense and starts its storage."""
    return static_int(tensor_of(value).storage_offset()) == 0 and keeps_strides(value)


def opaque_copy(graph: Graph, value: Node, *, before: Node) -> Node:
    """A copy that Inductor neither inlines nor fuses, as a call of ATen's own clone."""
    copied = insert(graph, aten.clone.default, (value,), before=before, like=value)
    copied.meta["should_fallback"] = True
    return copied


def copy_node(graph: Graph, value: Node, *, before: Node, any_layout: bool = False) -> Node | None:
    """A copy of `value` with its strides, or None when `clone` would change them."""
    if any_layout or keeps_strides(value):
        return insert(graph, aten.clone.default, (value,), before=before, like=value)
    return None
