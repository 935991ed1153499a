"""Queries, keys and values as graft::attention wants them: an existing node and the views to lay over it.

What the model lays in between is peeled off: transposes that cancel, heads repeated for grouped queries, a scale on
queries or keys. Nothing is edited here; `emit` makes the views once a match is decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.ir.edit import Editor
from graft.ir.nodes import is_op, same_sizes, tensor_of, tensor_val
from graft.ir.sizes.follow import number

aten = torch.ops.aten
ViewStep = tuple[Any, tuple[Any, ...]]  # an op and its arguments after the tensor


@dataclass(frozen=True)
class Operand:
    """`steps` laid over `node` give a tensor of `shape`."""

    node: Node
    steps: tuple[ViewStep, ...]
    shape: tuple[Any, ...]

    @staticmethod
    def of(node: Node) -> Operand:
        return Operand(node, (), tuple(tensor_of(node).shape))

    def permuted(self, order: Sequence[int]) -> Operand:
        if list(order) == sorted(order):
            return self
        shape = tuple(self.shape[i] for i in order)
        return absorbed(Operand(self.node, add_step(self.steps, (aten.permute.default, (tuple(order),))), shape))

    def with_heads(self) -> Operand:
        """[n, s, d] → [n, 1, s, d]: one head."""
        n, *rest = self.shape
        return Operand(self.node, (*self.steps, (aten.unsqueeze.default, (-3,))), (n, 1, *rest))


def add_step(steps: tuple[ViewStep, ...], step: ViewStep) -> tuple[ViewStep, ...]:
    """Two permutations in a row are one, or none."""
    if steps and steps[-1][0] is step[0] is aten.permute.default:
        order = tuple(steps[-1][1][0][i] for i in step[1][0])
        return steps[:-1] if list(order) == sorted(order) else (*steps[:-1], (aten.permute.default, (order,)))
    return (*steps, step)


def permutation(node: Any) -> tuple[int, ...] | None:
    """The order in which a node lays out the dims of its first argument, or None when it is no permutation."""
    if not is_op(node, aten.transpose.int, aten.permute.default):
        return None
    rank = tensor_of(node).dim()
    if node.target is aten.permute.default:
        return tuple(d % rank for d in node.args[1])
    order = list(range(rank))
    first, second = (d % rank for d in node.args[1:3])
    order[first], order[second] = second, first
    return tuple(order)


def below_permutations(operand: Operand) -> Operand:
    """The same operand, read from below every permutation that the graph lays over its source."""
    while (order := permutation(operand.node)) is not None:
        operand = replace(
            operand, node=operand.node.args[0], steps=join((aten.permute.default, (order,)), operand.steps)
        )
    return operand


def join(step: ViewStep, steps: tuple[ViewStep, ...]) -> tuple[ViewStep, ...]:
    """`step` below `steps`."""
    return (*add_step((step,), steps[0]), *steps[1:]) if steps else (step,)


def absorbed(operand: Operand) -> Operand:
    """While a permutation is the first step, permutations that the graph made below it go into it."""
    while operand.steps and operand.steps[0][0] is aten.permute.default:
        order = permutation(operand.node)
        if order is None:
            break
        steps = join((aten.permute.default, (order,)), operand.steps)
        operand = replace(operand, node=operand.node.args[0], steps=steps)
    return operand


def emit(editor: Editor, node: Node, steps: Sequence[ViewStep], before: Node, like: Node) -> list[Node]:
    """The views that `steps` are, each over the one before; the last is the result."""
    made = []
    for target, args in steps:
        if target is aten.permute.default:
            target, args = spelled_permutation(args[0])
        node = editor.call(target, (node, *args), before=before, like=like)
        made.append(node)
    return made


def spelled_permutation(order: Sequence[int]) -> ViewStep:
    moved = [i for i, d in enumerate(order) if i != d]
    if len(moved) == 2:
        return aten.transpose.int, (moved[0] - len(order), moved[1] - len(order))
    return aten.permute.default, (list(order),)


# ── scale ───────────────────────────────────────────────────────────────────────────────────────────────────────


MUL, DIV = (aten.mul.Tensor,), (aten.div.Tensor,)
MUL_IN_PLACE, DIV_IN_PLACE = (aten.mul_.Tensor, aten.mul_.Scalar), (aten.div_.Tensor, aten.div_.Scalar)


def factor_of(gm: GraphModule, node: Any, *, in_place: bool = False) -> tuple[Node, float] | None:
    """(x, c) where the node is x * c or x / c with a number c that changes neither shape nor dtype."""
    factors = MUL + MUL_IN_PLACE * in_place
    if not is_op(node, *factors, *DIV, *(DIV_IN_PLACE * in_place)) or len(node.args) != 2 or node.kwargs:
        return None
    source, by = node.args[0], number(gm, node.args[1])
    if by is None and node.target in factors:
        source, by = node.args[1], number(gm, node.args[0])
    tensor, result = tensor_val(source), tensor_of(node)
    if not by or tensor is None or tensor.dtype != result.dtype or not same_sizes(tensor.shape, result.shape):
        return None
    return source, by if node.target in factors else 1.0 / by


def unscaled(gm: GraphModule, operand: Operand, *, below: bool) -> tuple[Operand, float]:
    """The operand without the numbers that it is multiplied by, also `below` views, and those numbers multiplied.

    Not in float16: there a scale on the queries may be what keeps the scores from overflowing.
    """
    factor = 1.0
    while tensor_of(operand.node).dtype != torch.float16:
        source = below_views(operand) if below else operand
        found = factor_of(gm, source.node)
        if found is None:
            break
        operand = replace(source, node=found[0])
        factor *= found[1]
    return operand, factor


def below_views(operand: Operand) -> Operand:
    """The same operand, read from below the reshapes and permutations that the graph lays over its source."""
    node, steps = operand.node, operand.steps
    while True:
        order = permutation(node)
        if order is not None:
            steps = join((aten.permute.default, (order,)), steps)
        elif is_op(node, aten.reshape.default):
            steps = ((aten.reshape.default, (node.args[1],)), *steps)
        else:
            return replace(operand, node=node, steps=steps)
        node = node.args[0]


# ── heads ───────────────────────────────────────────────────────────────────────────────────────────────────────


def lifted(operand: Operand) -> Operand | None:
    """[b * h, s, d] that was folded from four dims → [b, h, s, d]; [b, kv, s, d] where heads were repeated first."""
    deep = below_permutations(operand)
    plain = not deep.steps or deep.steps == ((aten.permute.default, ((0, 2, 1),)),)
    if not plain or not is_op(deep.node, aten.reshape.default):
        return None
    source, folded = deep.node.args[0], tensor_of(deep.node).shape
    shape = tensor_of(source).shape
    if len(shape) not in (4, 5) or not same_sizes(shape[-2:], folded[-2:]):
        return None
    flat = Operand.of(source) if len(shape) == 4 else split_repeat(source, 1)
    if flat is None:
        return None
    return flat.permuted((0, 1, 3, 2)) if deep.steps else flat


def unrepeated(operand: Operand) -> Operand:
    """[b, h, t, d] → [b, kv, t, d] where the heads repeat; the same operand where they do not."""
    deep = below_permutations(operand)
    if any(step[0] is not aten.permute.default for step in deep.steps):
        return operand
    order = deep.steps[0][1][0] if deep.steps else (0, 1, 2, 3)
    fewer = repeated_source(deep.node, order[1])
    return operand if fewer is None else fewer.permuted(order)


def repeated_source(node: Node, axis: int) -> Operand | None:
    """What the heads, at `axis` of a four-dim node, were repeated from: each `groups` times, one after the other."""
    shape = tensor_of(node).shape
    if is_op(node, aten.repeat_interleave.self_int):
        dim = node.args[2] if len(node.args) > 2 else None
        return Operand.of(node.args[0]) if isinstance(dim, int) and dim % 4 == axis else None
    if is_op(node, aten.expand.default):  # one head for all
        source = Operand.of(node.args[0])
        one = len(source.shape) == 4 and source.shape[axis] == 1
        return source if one and same_sizes(without(source.shape, axis), without(shape, axis)) else None
    if not is_op(node, aten.reshape.default) or not is_op(node.args[0], aten.expand.default):
        return None
    inner = tensor_of(node.args[0]).shape
    if len(inner) != 5 or not same_sizes((*inner[:axis], *inner[axis + 2 :]), without(shape, axis)):
        return None
    return split_repeat(node.args[0], axis)


def split_repeat(node: Any, axis: int) -> Operand | None:
    """[…, kv, groups, …] expanded from […, kv, 1, …], as […, kv, …]."""
    if not is_op(node, aten.expand.default):
        return None
    shape, source = tensor_of(node).shape, node.args[0]
    given = tensor_of(source).shape
    if len(given) != 5 or given[axis + 1] != 1 or not same_sizes(without(given, axis + 1), without(shape, axis + 1)):
        return None
    if is_op(source, aten.unsqueeze.default) and source.args[1] % 5 == axis + 1:
        return Operand.of(source.args[0])
    squeeze = (aten.squeeze.dim, (axis + 1 - 5,))
    return Operand(source, (squeeze,), without(given, axis + 1))


def without(sizes: Sequence[Any], index: int) -> tuple[Any, ...]:
    return (*sizes[:index], *sizes[index + 1 :])
