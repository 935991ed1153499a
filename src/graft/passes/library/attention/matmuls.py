"""The two matmuls of attention, q·kᵀ and weights·v, however they are spelled: matmul, bmm or einsum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from graft.ir.nodes import is_op, tensor_of
from graft.passes.library.attention.operands import Operand, ViewStep

aten = torch.ops.aten
MATMULS = (aten.matmul.default, aten.bmm.default, aten.einsum.default)


@dataclass(frozen=True)
class Scores:
    """q: […, s, d] and k: […, t, d] of a matmul that gives […, s, t]."""

    q: Operand
    k: Operand


@dataclass(frozen=True)
class Values:
    """v: […, t, d], and how the result lies: the order of its dims, seen from […, s, d]."""

    v: Operand
    order: tuple[int, ...]


def operands(node: Node) -> tuple[Node, Node] | None:
    if not is_op(node, *MATMULS):
        return None
    pair = node.args[1] if node.target is aten.einsum.default else node.args
    return (pair[0], pair[1]) if len(pair) == 2 else None


def scores_matmul(node: Node) -> Scores | None:
    """What `node` multiplies, when it gives scores."""
    pair = operands(node)
    if pair is None or min(tensor_of(n).dim() for n in pair) < 2:
        return None
    q, k = (Operand.of(n) for n in pair)
    if node.target is aten.einsum.default:
        return einsum_scores(node.args[0], q, k)
    rank = len(k.shape)
    return Scores(q, k.permuted((*range(rank - 2), rank - 1, rank - 2)))


def values_matmul(node: Node) -> Values | None:
    """What the weights, the left operand of `node`, are multiplied with."""
    pair = operands(node)
    if pair is None or min(tensor_of(n).dim() for n in pair) < 2:
        return None
    v = Operand.of(pair[1])
    if node.target is aten.einsum.default:
        return einsum_values(node.args[0], v)
    return Values(v, tuple(range(tensor_of(node).dim())))


def letters(equation: str) -> tuple[str, str, str] | None:
    """`bhqd,bhkd->bhqk` → its three parts; None for an ellipsis, a repeated letter or no result."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    parts = (*inputs.split(","), result)
    plain = arrow and len(parts) == 3 and all(p.isalpha() and len(set(p)) == len(p) for p in parts)
    return (parts[0], parts[1], parts[2]) if plain else None


def einsum_scores(equation: str, left: Operand, right: Operand) -> Scores | None:
    parts = letters(equation)
    if parts is None:
        return None
    one, two, result = parts
    summed = set(one) & set(two) - set(result)
    if len(summed) != 1 or len(result) < 3:
        return None
    d, batch, s, t = summed.pop(), result[:-2], result[-2], result[-1]
    if s not in one:  # keys stand first
        one, two, left, right = two, one, right, left
    if set(one) != {*batch, s, d} or set(two) != {*batch, t, d}:
        return None
    q, k = (
        left.permuted([one.index(c) for c in batch + s + d]),
        right.permuted([two.index(c) for c in batch + t + d]),
    )
    return Scores(q, k)


def einsum_values(equation: str, v: Operand) -> Values | None:
    parts = letters(equation)
    if parts is None or len(parts[0]) < 3:
        return None
    weights, given, result = parts
    batch, s, t = weights[:-2], weights[-2], weights[-1]
    own = set(given) - {*batch, t}
    if len(own) != 1:
        return None
    d = own.pop()
    if set(given) != {*batch, t, d} or set(result) != {*batch, s, d}:
        return None
    standard = batch + s + d
    return Values(v.permuted([given.index(c) for c in batch + t + d]), tuple(standard.index(c) for c in result))


def result_steps(order: tuple[int, ...], folded: tuple[object, ...] | None) -> tuple[ViewStep, ...]:
    """From the op's [b, s, h, d] to what the matmul gave.

    `folded`: the sizes of [b * h, s, d] where heads and batch were one dim, () where there was one head only.
    """
    permute = aten.permute.default
    if len(order) == 4:
        overall = tuple((0, 2, 1, 3)[i] for i in order)
        return () if overall == (0, 1, 2, 3) else ((permute, (overall,)),)
    steps: tuple[ViewStep, ...] = ((aten.squeeze.dim, (-2,)),)
    if folded:
        steps = ((permute, ((0, 2, 1, 3),)), (aten.reshape.default, (list(folded),)))
    return steps if order == (0, 1, 2) else (*steps, (permute, (order,)))
