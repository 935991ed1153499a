"""Finds rotary embeddings in a graph, whatever their spelling: read by fuse_rope.

A head x of r values is rotated by cos and sin. Its parts are (x1, x2) = (lower half, upper half), or where it is
interleaved (even values, odd values). Three spellings mean the same:

    whole:    x * cos + join(-x2, x1) * sin                      join: cat for halves, stack + flatten for pairs
    parts:    join(x1 * cos - x2 * sin, x2 * cos + x1 * sin)     cos and sin have r/2 values
    complex:  view_as_real(view_as_complex(pairs of x) * freqs).flatten(-2)

Sizes of a reshape may be computed in the graph, which a pattern cannot say; so this is a walk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch.fx import Node

from graft.ir.canonical.rules import RESHAPES
from graft.ir.nodes import is_op, same_sizes, tensor_of, where
from graft.ir.patterns.match import Refused
from graft.passes.library.rope.heads import (
    HalfHead,
    Head,
    flattened_further,
    head_sizes,
    is_pairs,
    joined,
    no_part,
    origin_of,
    part_of,
    same_head,
    uncast,
    whole_head,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Rotation:
    """A rotation: `result` is `x` rotated by cos and sin, all three as the graph has them.

    sizes: x must first be reshaped to them. parts: x must first be put together from these two (DeepSeek reads pairs
    and writes halves). cos and sin: of r values, or `halved` of r/2; for the complex spelling both are `freqs`.
    origin: what x was read from besides, where that is another node than x. heads: the sizes of what rotates, where
    the result is a reshape of it.
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
    heads: tuple[Any, ...] | None = None


def find_rotation(node: Node) -> Rotation | None:
    """The rotation whose last step is `node`; Refused where it only looks like one, None where it does not."""
    if is_op(node, aten.add.Tensor, aten.sub.Tensor):
        return whole_rotation(node)
    if is_op(node, aten.cat.default, aten.stack.default):
        return parts_rotation(node)
    return complex_rotation(node) if is_op(node, aten.view_as_real.default) else None


# ── x * cos + join(-x2, x1) * sin ───────────────────────────────────────────────────────────────────────────────


def whole_rotation(node: Node) -> Rotation | None:
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
    head, interleaved, forwards = quarter_rotation(crossing)
    if forwards != is_op(node, aten.add.Tensor):
        raise Refused(node, f"{where(node)} rotates backwards")
    for operand, cos in (straight.args, straight.args[::-1]):
        if isinstance(operand, Node) and isinstance(cos, Node) and (x := same_head(operand, head)) is not None:
            return Rotation("whole", x, cos, sin, node, interleaved, origin=origin_of(head))
    raise Refused(straight, f"{where(straight)} does not read {where(head.node)}, whose values are rotated")


def crossing_factor(mul: Node) -> tuple[Node, Node] | None:
    """(join(-x2, x1), sin) where a `mul` has such a factor."""
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


def quarter_rotation(crossing: Node) -> tuple[Head, bool, bool]:
    """What rotates, whether in pairs, and whether forwards: (-x2, x1), or backwards: (x2, -x1)."""
    join = joined(crossing.args[0] if is_op(crossing, *RESHAPES) else crossing)
    if join is None or join[0] is not crossing:
        raise Refused(crossing, f"{where(crossing)} does not join its two parts along the head")
    _, (one, two), paired = join
    signs = [is_op(uncast(piece), aten.neg.default) for piece in (one, two)]
    bare = [uncast(uncast(p).args[0]) if negated else uncast(p) for p, negated in zip((one, two), signs, strict=True)]
    parts = [part_of(piece) for piece in bare]
    for part, piece in zip(parts, bare, strict=True):
        if part is None:
            raise Refused(piece, no_part(piece))
    first, second = (part for part in parts if part is not None)
    if first.head != second.head:
        raise Refused(second.node, f"{where(first.node)} and {where(second.node)} are parts of different tensors")
    if signs == [True, True] or (first.second, second.second) != (True, False):
        raise Refused(crossing, f"{where(crossing)} does not swap its two parts with one of them negated")
    if (first.paired, second.paired) != (paired, paired):
        raise Refused(crossing, f"{where(crossing)} joins pairs as halves, or halves as pairs")
    return first.head, paired, signs[0]


# ── join(x1 * cos - x2 * sin, x2 * cos + x1 * sin) ──────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Term:
    """± part * angle."""

    part: HalfHead
    angle: Node
    positive: bool


def parts_rotation(node: Node) -> Rotation | None:
    join = joined(node) or joined_further(node)
    sums = [terms for piece in join[1] for terms in [sum_of_terms(piece)] if terms is not None] if join else []
    if join is None or len(sums) != 2:
        return None
    result, _, paired = join
    first: Refused | None = None
    for terms in product(*sums[0], *sums[1]):
        try:
            rotation = rotation_of_terms(terms, result, paired)
        except Refused as refused:
            first = first or refused
        else:
            if rotation is not None:
                return laid_out(rotation, head_sizes(node)) if paired else rotation
    raise first or Refused(result, f"{where(result)} does not join x1 * cos - x2 * sin and x2 * cos + x1 * sin")


def joined_further(node: Node) -> tuple[Node, list[Node], bool] | None:
    """As `joined`, for a stack whose pairs and heads are laid out anew by one reshape."""
    last = is_op(node, aten.stack.default) and len(node.args) > 1 and node.args[1] in (-1, tensor_of(node).dim() - 1)
    result = flattened_further(node) if last and len(node.args[0]) == 2 else None
    return (result, list(node.args[0]), True) if result is not None else None


def laid_out(rotation: Rotation, heads: list[Any]) -> Rotation:
    """The rotation, told the sizes of its heads where the result has others."""
    return rotation if same_sizes(tensor_of(rotation.result).shape, heads) else replace(rotation, heads=tuple(heads))


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


def rotation_of_terms(terms: tuple[Term, ...], result: Node, paired: bool) -> Rotation | None:
    """The four terms as a rotation of one head, or None where they are not even its two parts twice."""
    one, two = (sorted(pair, key=lambda term: term.part.second) for pair in (terms[:2], terms[2:]))
    found = [(term.part.second, term.part.paired, term.part.head) for term in (*one, *two)]
    head, kind = one[0].part.head, one[0].part.paired
    if found != [(second, kind, head) for second in (False, True, False, True)]:
        return None
    (a, b), (c, d) = one, two
    if a.angle is not d.angle or b.angle is not c.angle:
        raise Refused(result, f"{where(result)} rotates its two parts by different angles")
    signs = [term.positive for term in (a, b, c, d)]
    if signs == [True, True, False, True]:
        raise Refused(result, f"{where(result)} rotates backwards")
    if signs != [True, False, True, True]:
        raise Refused(result, f"{where(result)} does not join x1 * cos - x2 * sin and x2 * cos + x1 * sin")
    if paired and not kind:
        raise Refused(result, f"{where(result)} joins halves as pairs")
    if kind and not paired:  # pairs are read, halves written
        parts = (a.part.node, b.part.node)
        return Rotation("parts", parts[0], a.angle, b.angle, result, False, True, parts=parts)
    x, sizes = whole_head(head)
    return Rotation("parts", x, a.angle, b.angle, result, paired, True, sizes)


# ── view_as_real(view_as_complex(pairs of x) * freqs) ───────────────────────────────────────────────────────────


def complex_rotation(node: Node) -> Rotation | None:
    mul = node.args[0]
    if not is_op(mul, aten.mul.Tensor):
        return None
    for head, freqs in (mul.args, mul.args[::-1]):
        pairs = uncast(head.args[0]) if is_op(head, aten.view_as_complex.default) else None
        if is_pairs(pairs) and isinstance(freqs, Node) and same_sizes(tensor_of(head).shape, tensor_of(mul).shape):
            break
    else:
        return None
    result = flattened_further(node)
    if result is None:
        raise Refused(node, f"{where(node)} is not flattened to heads again")
    if tensor_of(freqs).dtype is not torch.complex64:
        raise Refused(freqs, f"{where(freqs)} is {tensor_of(freqs).dtype}; the op rotates by float32 angles")
    if tensor_of(freqs).is_conj():
        raise Refused(freqs, f"{where(freqs)} is conjugate, so it rotates backwards")
    x, sizes = whole_head(Head(pairs, True))
    return laid_out(Rotation("complex", x, freqs, freqs, result, True, True, sizes), head_sizes(node))
