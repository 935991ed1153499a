"""Attention sinks: one more logit a head, joined to the scores before softmax, whose column is dropped after it."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from graft.ir.nodes import is_op, same_sizes, static_int, tensor_of, where
from graft.ir.patterns.match import Refused
from graft.passes.library.attention.parts import ScoreChain

aten = torch.ops.aten


def read_sinks(walk: ScoreChain, node: Node) -> Node:
    """`cat([scores, sinks], -1)`, perhaps less its row maximum: the scores, with the sinks noted."""
    joined = node
    if is_op(node, aten.sub.Tensor) and is_row_maximum(node.args[1], node.args[0]):
        joined = node.args[0]
    if not is_op(joined, aten.cat.default) or len(joined.args[0]) != 2 or joined.args[1:] != (-1,):
        return node
    columns = [static_int(tensor_of(piece).shape[-1]) for piece in joined.args[0]]
    if columns.count(1) != 1:
        raise Refused(joined, f"{where(joined)} joins the scores with more than one column")
    first = columns[0] == 1
    sinks, scores = joined.args[0] if first else reversed(joined.args[0])
    walk.sinks, walk.sinks_first, walk.shifted = one_logit_a_head(sinks, joined), first, joined is not node
    walk.sinks_at = joined
    walk.inner += [joined] if joined is node else [node, *maximum_nodes(node.args[1]), joined]
    return scores


def is_row_maximum(node: Any, of: Node) -> bool:
    nodes = maximum_nodes(node)
    return (
        bool(nodes)
        and nodes[-1].args[0] is of
        and nodes[-1].args[1] in (-1, 3, [-1], [3])
        and nodes[-1].args[2:] == (True,)
    )


def maximum_nodes(node: Any) -> list[Node]:
    """`amax(x, -1, True)`, or `max(x, -1, True)` and the item that takes its values."""
    if is_op(node, aten.amax.default):
        return [node]
    takes = is_op(node, operator.getitem) and node.args[1] == 0 and is_op(node.args[0], aten.max.dim)
    return [node, node.args[0]] if takes else []


def one_logit_a_head(sinks: Node, joined: Node) -> Node:
    """The [h] or [1, h, 1, 1] tensor that was spread over batch and queries, its heads in dim 1 of the scores."""
    source, axis, heads = sinks, 1 if tensor_of(joined).dim() == 4 else None, tensor_of(joined).shape[1]
    while (
        is_op(source, aten.expand.default, aten.reshape.default, aten.unsqueeze.default)
        and tensor_of(source).dim() > 1
    ):
        axis = axis_below(source, axis)
        source = source.args[0]
    if axis is None or not only_axis(source, axis, heads):
        raise Refused(sinks, f"{where(sinks)} joins the scores, but is not one logit a head")
    if tensor_of(source).dtype != tensor_of(joined).dtype:
        raise Refused(source, f"the sinks {where(source)} are {tensor_of(source).dtype}, the scores are not")
    return source


def axis_below(node: Node, axis: int | None) -> int | None:
    """Where `axis` of a view lies in what is viewed; None where it does not, or cannot be told."""
    shape, below = tensor_of(node).shape, tensor_of(node.args[0]).shape
    if axis is None:
        return None
    if is_op(node, aten.expand.default):
        axis -= len(shape) - len(below)
        return axis if axis >= 0 else None
    if is_op(node, aten.unsqueeze.default):
        new = node.args[1] % len(shape)
        return None if new == axis else axis - (axis > new)
    if same_sizes(shape, below):
        return axis
    axes = [i for i, size in enumerate(below) if static_int(size) != 1] or [0]
    return axes[0] if len(axes) == 1 and only_axis(node, axis, shape[axis]) else None


def only_axis(node: Node, axis: int, size: Any) -> bool:
    """Whether a tensor is one in every dim but `axis`, and `size` there."""
    shape = tensor_of(node).shape
    return same_sizes(shape, [size if i == axis else 1 for i in range(len(shape))])


def check_columns(walk: ScoreChain, softmax: Node, path: Collection[Node]) -> None:
    """The sink's column, and nothing else, is dropped after the softmax."""
    cuts = [node for node in path if is_op(node, aten.slice.Tensor)]
    if walk.sinks is None:
        if cuts:
            raise Refused(cuts[0], f"{where(cuts[0])} takes a part of the weights")
        return
    if len(cuts) != 1 or cuts[0].args[1] != -1:
        raise Refused(softmax, f"the sink's column is not dropped after {where(softmax)}")
    start = cuts[0].args[2] if len(cuts[0].args) > 2 else 0
    kept = tensor_of(cuts[0]).shape[-1] + 1
    if start != int(walk.sinks_first) or not same_sizes([kept], [tensor_of(softmax).shape[-1]]):
        raise Refused(cuts[0], f"{where(cuts[0])} drops another column than the sink's")
