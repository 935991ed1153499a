"""Parts of a head (halves, or even and odd values) and how they are put together again: for rotary.py."""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from graft.ir.canonical.rules import RESHAPES
from graft.ir.nodes import is_op, same_sizes, static_int, tensor_of, tensor_val, where

aten = torch.ops.aten


@dataclass(frozen=True)
class Head:
    """What rotates: `node` is [..., r], or where it was `split` into pairs [..., r/2, 2]."""

    node: Node
    split: bool = False


@dataclass(frozen=True)
class HalfHead:
    """Half of the last dim of a head: its lower or upper half, or its even or odd values."""

    node: Node
    head: Head
    paired: bool
    second: bool


def uncast(node: Any) -> Any:
    """Follows casts that lose nothing upward."""
    while is_op(node, aten.to.dtype) and widens(node):
        node = node.args[0]
    return node


def widens(cast: Node) -> bool:
    source, result = tensor_of(cast.args[0]).dtype, tensor_of(cast).dtype
    return source.is_floating_point and torch.promote_types(source, result) == result


def part_of(node: Any) -> HalfHead | None:
    """`x[..., :r/2]`, `x[..., 1::2]`, `x.reshape(…, r/2, 2)[..., 0]`, `….unbind(-1)[0]`."""
    if is_op(node, aten.slice.Tensor) and len(node.args) >= 4 and node.args[1] == -1:
        return sliced_part(node)
    if is_op(node, aten.select.int) and node.args[1] == -1:
        pairs, index = node.args[0], node.args[2]
    elif is_op(node, getitem) and is_op(node.args[0], aten.unbind.int):
        pairs, index = node.args[0].args[0], node.args[1]
        dim = node.args[0].args[1] if len(node.args[0].args) > 1 else 0
        if dim not in (-1, tensor_of(pairs).dim() - 1):
            return None
    else:
        return None
    return HalfHead(node, Head(uncast(pairs), True), True, index in (1, -1)) if is_pairs(uncast(pairs)) else None


def sliced_part(node: Node) -> HalfHead | None:
    source, _, start, end, *step = node.args
    size = static_int(tensor_of(source).shape[-1])
    if size is None or size % 2 or not isinstance(start, int) or not isinstance(end, int):
        return None
    head = Head(uncast(source))
    if step == [2]:
        return HalfHead(node, head, True, start == 1) if start in (0, 1) and end >= size else None
    if not step and (start, end) in ((0, size // 2), (size // 2, size)):
        return HalfHead(node, head, False, start > 0)
    return None


def is_pairs(node: Any) -> bool:
    """A reshape to [..., n, 2] that takes a last dim of an even size apart."""
    tensor = tensor_val(node)
    if tensor is None or not is_op(node, *RESHAPES) or tensor.dim() < 2:
        return False
    return static_int(tensor.shape[-1]) == 2 and static_int(tensor.shape[-2]) is not None


def head_sizes(pairs: Node) -> list[Any]:
    """[..., n, 2] → [..., 2 n]."""
    *lead, count, _ = tensor_of(pairs).shape
    return [*lead, 2 * count]


def joined(node: Node) -> tuple[Node, list[Node], bool] | None:
    """The result, the two pieces and whether they are laid out as pairs: `cat([a, b], -1)`, `stack([a, b], -1)`."""
    if len(node.args[0]) != 2 or len(node.args) < 2:
        return None
    dim = node.args[1]
    if is_op(node, aten.cat.default):
        return (node, list(node.args[0]), False) if dim == -1 else None
    flat = flattened(node) if dim in (-1, tensor_of(node).dim() - 1) else None
    return (flat, list(node.args[0]), True) if flat is not None else None


def flattened(pairs: Node) -> Node | None:
    """The reshape from [..., n, 2] to [..., 2 n] that alone reads `pairs`, or None."""
    reader = next(iter(pairs.users), None)
    if len(pairs.users) != 1 or not is_op(reader, *RESHAPES):
        return None
    return reader if reader is not None and same_sizes(tensor_of(reader).shape, head_sizes(pairs)) else None


def flattened_further(pairs: Node) -> Node | None:
    """As `flattened`, also where reshapes lay the heads out anew (two that became one): the only one, or of several
    what they read."""
    if not pairs.users or not all(is_op(reader, *RESHAPES) for reader in pairs.users):
        return None
    only = next(iter(pairs.users)) if len(pairs.users) == 1 else None
    return flattened(pairs) or (only if is_op(only, aten.reshape.default) else pairs)


def no_part(piece: Node) -> str:
    size = tensor_of(piece.args[0]).shape[-1] if is_op(piece, aten.slice.Tensor) else 0
    if isinstance(size, int) and size % 2:
        return f"{where(piece)} is part of {size} values, an odd number, which cannot rotation in pairs"
    return f"{where(piece)} is no half of a head, nor every second value of one"


def origin_of(head: Head) -> Node:
    return uncast(head.node.args[0]) if head.split else head.node


def same_head(operand: Node, head: Head) -> Node | None:
    """`operand` without its casts, where it is the head that was taken apart."""
    x = uncast(operand)
    if not head.split:
        return x if x is head.node else None
    origin = origin_of(head)
    again = is_op(x, *RESHAPES) and uncast(x.args[0]) is origin  # both are reshapes of one tensor
    same = x is origin or again
    return x if same and same_sizes(tensor_of(x).shape, head_sizes(head.node)) else None


def whole_head(head: Head) -> tuple[Node, tuple[Any, ...] | None]:
    """What rotates, and the sizes it must be reshaped to first: where pairs were made of more than the last dim."""
    if not head.split:
        return head.node, None
    origin = origin_of(head)
    if same_sizes(tensor_of(origin).shape, head_sizes(head.node)):
        return origin, None
    return origin, (*head.node.args[1][:-2], head_sizes(head.node)[-1])
