"""Reshapes, slices and casts: another way to look at the same numbers, without a step."""

from __future__ import annotations

from dataclasses import replace
from operator import getitem

import torch
from torch.fx import Node

from graft.backends.native.plan import FLOATS, Planner, lowers
from graft.backends.native.program import HeadLayout, NotLowered, Value
from graft.ir.nodes import options_of, static_int, tensor_of

aten = torch.ops.aten


@lowers(aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim)
def lower_reshape(plan: Planner, node: Node) -> None:
    value = plan.value(node.args[0])
    plan.bind(node, viewed(value, plan.layout(node)))


def viewed(value: Value, layout: HeadLayout) -> Value:
    """The same rows in other heads; a row's numbers keep their order."""
    old = value.layout
    if (old.rows, old.width) != (layout.rows, layout.width):
        raise NotLowered("it moves numbers from row to row")
    if (old.heads, old.size) == (layout.heads, layout.size):
        crossed = layout.heads > 1 and "heads" in (old.order, layout.order) and old.order != layout.order
        if not crossed:
            return replace(value, layout=layout)
    if not value.dense or "heads" in (order_of(old), order_of(layout)):
        raise NotLowered("heads stand before rows, so that a reshape would copy")
    return replace(value, layout=layout, head_stride=layout.size)


def order_of(layout: HeadLayout) -> str:
    return layout.order if layout.heads > 1 else "rows"


@lowers(aten.transpose.int)
def lower_transpose(plan: Planner, node: Node) -> None:
    value, layout = plan.value(node.args[0]), plan.layout(node)
    same = (value.layout.rows, value.layout.heads, value.layout.size) == (layout.rows, layout.heads, layout.size)
    if not same or {value.layout.order, layout.order} != {"rows", "heads"}:
        raise NotLowered("it does not swap rows and heads")
    plan.bind(node, replace(value, layout=layout))


@lowers(aten.slice.Tensor)
def lower_slice(plan: Planner, node: Node) -> None:
    """Of a row's numbers, or of its heads."""
    value, layout = plan.value(node.args[0]), plan.layout(node)
    options = options_of(node)
    rank = tensor_of(node.args[0]).dim()
    dim, start = options["dim"] % rank, static_int(options["start"] or 0)
    if options["step"] != 1 or start is None or start < 0:
        raise NotLowered("it takes every n-th number, or counts from the end")
    heads_dim = {"rows": rank - 2, "heads": rank - 3, "flat": None}[value.layout.order]
    if dim == rank - 1:
        moved = value.column + start
    elif dim == heads_dim:
        moved = value.column + start * value.head_stride
    else:
        raise NotLowered("it takes a part of the rows")
    plan.bind(node, replace(value, layout=layout, column=moved))


@lowers(
    aten.to.dtype, aten.contiguous.default, aten.clone.default, aten.detach.default, aten.alias.default,
    aten._to_copy.default,
)  # fmt: skip
def lower_alias(plan: Planner, node: Node) -> None:
    """Numbers are float32 inside, whatever the graph calls them."""
    if tensor_of(node).dtype not in FLOATS or tensor_of(node.args[0]).dtype not in FLOATS:
        raise NotLowered("it turns indices into numbers, or numbers into indices")
    plan.bind(node, plan.value(node.args[0]))


@lowers(getitem)
def lower_getitem(plan: Planner, node: Node) -> None:
    found = plan.values.get(node.args[0])
    if not isinstance(found, tuple):
        raise NotLowered(f"{node.args[0]} is not lowered")
    plan.bind(node, found[node.args[1]])
