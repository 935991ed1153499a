"""Finds rotary embeddings in a graph, whatever their spelling: read by fuse_rope.

A head x of r values turns by cos and sin. Its parts are (x1, x2) = (lower half, upper half), or where it is
interleaved (even values, odd values). Three spellings mean the same:

    whole:    x * cos + join(-x2, x1) * sin                      join: cat for halves, stack + flatten for pairs
    parts:    join(x1 * cos - x2 * sin, x2 * cos + x1 * sin)     cos and sin have r/2 values
    complex:  view_as_real(view_as_complex(pairs of x) * freqs).flatten(-2)

Sizes of a reshape may be computed in the graph, which a pattern cannot say; so this is a walk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from graft.graph.nodes import is_op, same_sizes, static_int, tensor_of, tensor_val, where
from graft.graph.rules import RESHAPES

aten = torch.ops.aten


@dataclass(frozen=True)
class Turn:
    """A rotation: `result` is `x` turned by cos and sin, all three as the graph has them.

    sizes: x must first be reshaped to them. parts: x must first be put together from these two (DeepSeek reads pairs
    and writes halves). cos and sin: of r values, or `halved` of r/2; for the complex spelling both are `freqs`.
    origin: what x was read from besides, where that is another node than x.
    """

    spelling: str
    x: Node
    cos: Node
    sin: Node
    result: Node
    interleaved: bool
    halved: bool = False
    sizes: tuple[Any, ...] | None = None
    parts: tuple[Node, Node] | None = None
    origin: Node | None = None


@dataclass(frozen=True)
class Refusal:
    """Something that looks like a rotation and is none that the op could do."""

    node: Node
    reason: str


@dataclass(frozen=True)
class Head:
    """What turns: `node` is [..., r], or where it was `split` into pairs [..., r/2, 2]."""

    node: Node
    split: bool = False


@dataclass(frozen=True)
class Part:
    """Half of the last dim of a head: its lower or upper half, or its even or odd values."""

    node: Node
    head: Head
    paired: bool
    second: bool


def find_turn(node: Node) -> Turn | Refusal | None:
    """The rotation whose last step is `node`, why it is none, or None where nothing looks like one."""
    if is_op(node, aten.add.Tensor, aten.sub.Tensor):
        return whole_turn(node)
    if is_op(node, aten.cat.default, aten.stack.default):
        return parts_turn(node)
    return complex_turn(node) if is_op(node, aten.view_as_real.default) else None


# ── parts of a head ─────────────────────────────────────────────────────────────────────────────────────────────


def uncast(node: Any) -> Any:
    """Follows casts that lose nothing upward."""
    while is_op(node, aten.to.dtype) and widens(node):
        node = node.args[0]
    return node


def widens(cast: Node) -> bool:
    source, result = tensor_of(cast.args[0]).dtype, tensor_of(cast).dtype
    return source.is_floating_point and torch.promote_types(source, result) == result


def part_of(node: Any) -> Part | None:
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
    return Part(node, Head(uncast(pairs), True), True, index in (1, -1)) if is_pairs(uncast(pairs)) else None


def sliced_part(node: Node) -> Part | None:
    source, _, start, end, *step = node.args
    size = static_int(tensor_of(source).shape[-1])
    if size is None or size % 2 or not isinstance(start, int) or not isinstance(end, int):
        return None
    head = Head(uncast(source))
    if step == [2]:
        return Part(node, head, True, start == 1) if start in (0, 1) and end >= size else None
    if not step and (start, end) in ((0, size // 2), (size // 2, size)):
        return Part(node, head, False, start > 0)
    return None


def is_pairs(node: Any) -> bool:
    """A reshape to [..., n, 2] that takes a last dim of an even size apart."""
    tensor = tensor_val(node)
    if tensor is None or not is_op(node, *RESHAPES) or tensor.dim() < 2 or tensor.shape[-1] != 2:
        return False
    return static_int(tensor.shape[-2]) is not None


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


# ── x * cos + join(-x2, x1) * sin ───────────────────────────────────────────────────────────────────────────────


def whole_turn(node: Node) -> Turn | Refusal | None:
    if node.kwargs or not all(is_op(term, aten.mul.Tensor) for term in node.args):
        return None
    straight, crossed = node.args
    factor = crossing_factor(crossed)
    if factor is None and is_op(node, aten.add.Tensor):
        straight, crossed = crossed, straight
        factor = crossing_factor(crossed)
    if factor is None:
        return None
    crossing, sin = factor
    found = quarter_turn(crossing)
    if isinstance(found, Refusal):
        return found
    head, interleaved, forwards = found
    if forwards != is_op(node, aten.add.Tensor):
        return Refusal(node, f"{where(node)} turns backwards")
    for operand, cos in (straight.args, straight.args[::-1]):
        if isinstance(operand, Node) and isinstance(cos, Node) and (x := same_head(operand, head)) is not None:
            return Turn("whole", x, cos, sin, node, interleaved, origin=origin_of(head))
    return Refusal(straight, f"{where(straight)} does not read {where(head.node)}, whose values are turned")


def crossing_factor(mul: Node) -> tuple[Node, Node] | None:
    """(join(-x2, x1), sin) where a product has such a factor."""
    for factor, sin in (mul.args, mul.args[::-1]):
        crossing = uncast(factor)
        if isinstance(sin, Node) and any(is_op(uncast(p), aten.neg.default) for p in crossed_pieces(crossing)):
            return crossing, sin
    return None


def crossed_pieces(crossing: Any) -> list[Any]:
    """What is joined: two pieces of a cat, or of a stack that is flattened."""
    if is_op(crossing, *RESHAPES):
        crossing = crossing.args[0]
    pieces = crossing.args[0] if is_op(crossing, aten.cat.default, aten.stack.default) else []
    return list(pieces) if len(pieces) == 2 else []


def quarter_turn(crossing: Node) -> tuple[Head, bool, bool] | Refusal:
    """What turns, whether in pairs, and whether forwards: (-x2, x1), or backwards: (x2, -x1)."""
    join = joined(crossing.args[0] if is_op(crossing, *RESHAPES) else crossing)
    if join is None or join[0] is not crossing:
        return Refusal(crossing, f"{where(crossing)} does not join its two parts along the head")
    _, (one, two), paired = join
    signs = [is_op(uncast(piece), aten.neg.default) for piece in (one, two)]
    bare = [uncast(uncast(p).args[0]) if negated else uncast(p) for p, negated in zip((one, two), signs, strict=True)]
    parts = [part_of(piece) for piece in bare]
    for part, piece in zip(parts, bare, strict=True):
        if part is None:
            return Refusal(piece, no_part(piece))
    first, second = (part for part in parts if part is not None)
    if first.head != second.head:
        return Refusal(second.node, f"{where(first.node)} and {where(second.node)} are parts of different tensors")
    if signs == [True, True] or (first.second, second.second) != (True, False):
        return Refusal(crossing, f"{where(crossing)} does not swap its two parts with one of them negated")
    if (first.paired, second.paired) != (paired, paired):
        return Refusal(crossing, f"{where(crossing)} joins pairs as halves, or halves as pairs")
    return first.head, paired, signs[0]


def no_part(piece: Node) -> str:
    size = tensor_of(piece.args[0]).shape[-1] if is_op(piece, aten.slice.Tensor) else 0
    if isinstance(size, int) and size % 2:
        return f"{where(piece)} is part of {size} values, an odd number, which cannot turn in pairs"
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


# ── join(x1 * cos - x2 * sin, x2 * cos + x1 * sin) ──────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Term:
    """± part * angle."""

    part: Part
    angle: Node
    positive: bool


def parts_turn(node: Node) -> Turn | Refusal | None:
    join = joined(node)
    sums = [terms for piece in join[1] for terms in [sum_of_terms(piece)] if terms is not None] if join else []
    if join is None or len(sums) != 2:
        return None
    result, _, paired = join
    choices = [
        turn for terms in product(*sums[0], *sums[1]) for turn in [turn_of_terms(terms, result, paired)] if turn
    ]
    good = next((turn for turn in choices if isinstance(turn, Turn)), None)
    if good is not None:
        return good
    said = next((turn for turn in choices if isinstance(turn, Refusal)), None)
    return said or Refusal(result, f"{where(result)} does not join x1 * cos - x2 * sin and x2 * cos + x1 * sin")


def sum_of_terms(piece: Any) -> list[list[Term]] | None:
    """For both terms of `a ± b` the ways to read it as ± part * angle; None where one has none."""
    if not is_op(piece, aten.add.Tensor, aten.sub.Tensor) or piece.kwargs:
        return None
    ways = [
        list(readings(mul, positive))
        for mul, positive in zip(piece.args, (True, is_op(piece, aten.add.Tensor)), strict=True)
    ]
    return ways if all(ways) else None


def readings(mul: Any, positive: bool) -> Iterator[Term]:
    if is_op(mul, aten.mul.Tensor):
        for operand, angle in (mul.args, mul.args[::-1]):
            bare = uncast(operand)
            negated = is_op(bare, aten.neg.default)
            part = part_of(uncast(bare.args[0]) if negated else bare)
            if part is not None and isinstance(angle, Node):
                yield Term(part, angle, positive != negated)


def turn_of_terms(terms: tuple[Term, ...], result: Node, paired: bool) -> Turn | Refusal | None:
    """The four terms as a rotation of one head, or None where they are not even its two parts twice."""
    one, two = (sorted(pair, key=lambda term: term.part.second) for pair in (terms[:2], terms[2:]))
    places = [(term.part.second, term.part.paired, term.part.head) for term in (*one, *two)]
    head, kind = one[0].part.head, one[0].part.paired
    if places != [(second, kind, head) for second in (False, True, False, True)]:
        return None
    (a, b), (c, d) = one, two
    if a.angle is not d.angle or b.angle is not c.angle:
        return Refusal(result, f"{where(result)} turns its two parts by different angles")
    signs = [term.positive for term in (a, b, c, d)]
    if signs == [True, True, False, True]:
        return Refusal(result, f"{where(result)} turns backwards")
    if signs != [True, False, True, True]:
        return Refusal(result, f"{where(result)} does not join x1 * cos - x2 * sin and x2 * cos + x1 * sin")
    if paired and not kind:
        return Refusal(result, f"{where(result)} joins halves as pairs")
    if kind and not paired:  # pairs are read, halves written
        parts = (a.part.node, b.part.node)
        return Turn("parts", parts[0], a.angle, b.angle, result, False, True, parts=parts)
    x, sizes = whole_head(head)
    return Turn("parts", x, a.angle, b.angle, result, paired, True, sizes)


def whole_head(head: Head) -> tuple[Node, tuple[Any, ...] | None]:
    """What turns, and the sizes it must be reshaped to first: where pairs were made of more than the last dim."""
    if not head.split:
        return head.node, None
    origin = origin_of(head)
    if same_sizes(tensor_of(origin).shape, head_sizes(head.node)):
        return origin, None
    return origin, (*head.node.args[1][:-2], head_sizes(head.node)[-1])


# ── view_as_real(view_as_complex(pairs of x) * freqs) ───────────────────────────────────────────────────────────


def complex_turn(node: Node) -> Turn | Refusal | None:
    mul = node.args[0]
    if not is_op(mul, aten.mul.Tensor):
        return None
    for head, freqs in (mul.args, mul.args[::-1]):
        pairs = uncast(head.args[0]) if is_op(head, aten.view_as_complex.default) else None
        if is_pairs(pairs) and isinstance(freqs, Node) and same_sizes(tensor_of(head).shape, tensor_of(mul).shape):
            break
    else:
        return None
    result = flattened(node)
    if result is None:
        return Refusal(node, f"{where(node)} is not flattened to heads again")
    if tensor_of(freqs).dtype is not torch.complex64:
        return Refusal(freqs, f"{where(freqs)} is {tensor_of(freqs).dtype}; the op turns by float32 angles")
    if tensor_of(freqs).is_conj():
        return Refusal(freqs, f"{where(freqs)} is conjugate, so it turns backwards")
    x, sizes = whole_head(Head(pairs, True))
    return Turn("complex", x, freqs, freqs, result, True, True, sizes)
