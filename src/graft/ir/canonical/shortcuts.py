"""Calls that change nothing, as rules of the normal form: `shortcut` names an existing node with the same value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from graft.ir.effects import with_views
from graft.ir.nodes import is_op, same_shape, tensor_of, tensor_val

aten = torch.ops.aten


def shortcut(node: Node) -> Node | None:
    """The node that this call only repeats, or None."""
    rule = SHORTCUTS.get(node.target)
    return rule(node) if rule is not None else None


def if_same(node: Node) -> Node | None:
    """The input, when it has the result's shape, dtype and device."""
    source, result = node.args[0], tensor_val(node)
    given = tensor_val(source)
    if given is None or result is None:
        return None
    equal = same_shape(given, result) and given.dtype == result.dtype and given.device == result.device
    return source if equal else None


def if_neutral(neutral: float) -> Callable[[Node], Node | None]:
    """`x + 0`, `x * 1`: the input, when the literal changes neither shape nor dtype."""

    def rule(node: Node) -> Node | None:
        literal = node.args[1]
        plain = isinstance(literal, (int, float)) and not isinstance(literal, bool) and not node.kwargs
        return if_same(node) if plain and literal == neutral else None

    return rule


def if_contiguous(node: Node) -> Node | None:
    given = tensor_val(node.args[0])
    if given is None or node.kwargs:
        return None
    return node.args[0] if given.is_contiguous() else None


def if_undone(node: Node) -> Node | None:
    """Dims put back where they were: a transpose of the same transpose, also of a contiguous copy of it."""
    source = node.args[0]
    copied = is_op(source, aten.contiguous.default) or (is_op(source, aten.clone.default) and in_one_piece(source))
    inner = source.args[0] if copied else source
    if not is_op(inner, aten.transpose.int, aten.permute.default) or (copied and is_returned(node)):
        return None
    first, second = dim_order(inner), dim_order(node)
    undone = first is not None and second is not None and [first[d] for d in second] == sorted(first)
    return inner.args[0] if undone else None


def dim_order(node: Node) -> list[int] | None:
    """Which dim of its input each dim of a transpose or permute is."""
    tensor = tensor_val(node.args[0])
    if tensor is None:
        return None
    rank = tensor.dim()
    if node.target is aten.permute.default:
        return [d % rank for d in node.args[1]]
    order, (one, other) = list(range(rank)), (d % rank for d in node.args[1:3])
    order[one], order[other] = other, one
    return order


def in_one_piece(clone: Node) -> bool:
    """`clone(memory_format=contiguous)`, which copies as `contiguous` does."""
    return clone.kwargs.get("memory_format") is torch.contiguous_format


def is_returned(node: Node) -> bool:
    """The caller gets it, or a view of it: where a copy was made it must get a copy."""
    return any(user.op == "output" for view in with_views([node]) for user in view.users)


def if_inference_dropout(node: Node) -> Node | None:
    _, probability, train = node.args
    return node.args[0] if probability == 0 or train is False else None


def if_one_piece(node: Node) -> Node | None:
    """Empty pieces of a concatenation fall away; a single piece is the result."""
    if any(tensor_of(p).dtype != tensor_of(node).dtype for p in node.args[0]):
        return None  # an empty piece may still decide the dtype
    pieces = [p for p in node.args[0] if 0 not in tensor_of(p).shape]
    if len(pieces) == 1:
        return pieces[0] if same_shape(tensor_of(pieces[0]), tensor_of(node)) else None
    if pieces and len(pieces) < len(node.args[0]):
        node.args = (pieces, *node.args[1:])
    return None


def first_argument(node: Node) -> Node | None:
    return node.args[0] if isinstance(node.args[0], Node) else None


SHORTCUTS: dict[Any, Callable[[Node], Node | None]] = {
    **{op: if_same for op in (aten.reshape.default, aten.expand.default, aten.slice.Tensor)},
    aten.to.dtype: lambda node: if_same(node) if len(node.args) == 2 else None,
    **{op: first_argument for op in (aten.alias.default, aten.detach.default, aten.lift_fresh.default)},
    aten.contiguous.default: if_contiguous,
    **{op: if_undone for op in (aten.transpose.int, aten.permute.default)},
    aten.dropout.default: if_inference_dropout,
    aten.cat.default: if_one_piece,
    aten.add.Tensor: if_neutral(0),
    aten.sub.Tensor: if_neutral(0),
    aten.mul.Tensor: if_neutral(1),
    aten.div.Tensor: if_neutral(1),
}
