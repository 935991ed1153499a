"""Reads groups of experts of which only the best are chosen from (DeepSeek).

sums = choice.view(n, g, e / g).topk(2, -1)[0].sum(-1), or .max(-1)[0];  best = topk(sums, m)[1]
choice.masked_fill(~zeros(n, g).scatter_(1, best, 1)[:, :, None].expand(n, g, e / g).reshape(n, e).bool(), -inf)
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from graft.ir.nodes import is_op, options_of, static_int, tensor_of, where
from graft.passes.walk import GraphWalk, require

aten = torch.ops.aten
SCORES = (aten.softmax.int, aten.sigmoid.default)
FILLS = (aten.masked_fill.Scalar, aten.masked_fill_.Scalar)
ONES = (aten.scatter_.value, aten.scatter.value)
NOTS = (aten.bitwise_not.default, aten.logical_not.default)
RESHAPES = (aten.reshape.default, aten.view.default)
ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
FULLS = (aten.full.default, aten.full_like.default, aten.new_full.default)


@dataclass(frozen=True)
class ExpertGroups:
    """Of `count` groups the `top` with the largest sum of their `best` largest."""

    count: int = 1
    top: int = 1
    best: int = 1


ONE_GROUP = ExpertGroups()


def read_groups(walk: GraphWalk, choice: Any, k: int) -> tuple[Any, ExpertGroups]:
    """What is chosen by, without the mask of groups that are left out, and the groups."""
    if not is_op(choice, *FILLS):
        return choice, ONE_GROUP
    source, mask, filler = walk.take(choice).args
    e = static_int(tensor_of(choice).shape[-1])
    flags = read_flags(walk, mask, choice)  # [n, groups], 1 for those that are chosen from
    zeros, dim, index, one = walk.call(flags, choice, *ONES).args
    fits = dim in (1, -1) and one == 1 and is_filled(zeros, 0.0)
    require(fits, flags, f"{where(flags)} does not set a 1 for each of the best groups")
    walk.take(zeros)
    chosen = walk.call(index, flags, getitem)
    best = walk.call(chosen.args[0], chosen, aten.topk.default)
    options = options_of(best)
    plain = chosen.args[1] == 1 and options["largest"] and options["dim"] in (-1, 1)
    require(plain, best, f"{where(best)} does not take the best groups")
    groups, top = static_int(tensor_of(flags).shape[-1]), options["k"]
    fits = groups is not None and e is not None and isinstance(top, int) and e % groups == 0
    require(fits, best, f"{where(best)} takes a computed number of groups")
    assert groups is not None and e is not None
    number = read_sums(walk, options["self"], best, source, (groups, e // groups))
    require(top * (e // groups) >= k, best, f"{where(best)} takes {top} groups, in which there are not {k} experts")
    positive = filler == 0 and is_op(source, *SCORES)  # so that what is left out is never chosen
    never = filler == -float("inf") or positive
    require(never, choice, f"{where(choice)} gives the experts of other groups {filler}, which may be chosen")
    return source, ExpertGroups(groups, top, number) if top < groups else ONE_GROUP


def read_flags(walk: GraphWalk, mask: Any, reader: Node) -> Node:
    """~flags[:, :, None].expand(n, g, e / g).reshape(n, e).bool(): flags."""
    value = walk.call(mask, reader, *NOTS).args[0]
    if is_op(value, aten.to.dtype) and tensor_of(value).dtype is torch.bool:
        value = walk.take(value).args[0]
    flat = walk.call(value, reader, *RESHAPES)
    value = flat.args[0]
    if is_op(value, aten.expand.default):
        value = walk.take(value).args[0]
    column = walk.call(value, flat, aten.unsqueeze.default)
    behind = column.args[1] in (-1, 2) and tensor_of(column).dim() == 3 and tensor_of(flat).dim() == 2
    require(behind, column, f"{where(column)} does not say the same of all experts of a group")
    return column.args[0]


def read_sums(walk: GraphWalk, value: Any, reader: Node, source: Any, shape: tuple[int, int]) -> int:
    """By how many of its largest a group is chosen."""
    if is_op(value, aten.sum.dim_IntList):
        total = walk.take(value)
        plain = total.args[1:] in (([-1],), ([-1], False)) and not total.kwargs
        require(plain, total, f"{where(total)} does not sum over the experts of a group")
        largest = walk.call(total.args[0], total, getitem)
        topk = walk.call(largest.args[0], largest, aten.topk.default)
        options = options_of(topk)
        plain = largest.args[1] == 0 and options["largest"] and options["dim"] in (-1, 2)
        require(plain and isinstance(options["k"], int), topk, f"{where(topk)} does not take the largest of a group")
        grouped, count, over = options["self"], int(options["k"]), topk
    else:
        largest = walk.call(value, reader, aten.amax.default, getitem)
        over = largest if is_op(largest, aten.amax.default) else walk.call(largest.args[0], largest, aten.max.dim)
        alike = over is largest or largest.args[1] == 0
        plain = alike and over.args[1] in (-1, 2, [-1], [2]) and len(over.args) == 2
        require(plain, over, f"{where(over)} does not take the largest of a group")
        grouped, count = over.args[0], 1
    view = walk.call(grouped, over, *RESHAPES)
    sizes = tuple(static_int(size) for size in tensor_of(view).shape[-2:])
    fits = view.args[0] is source and tensor_of(view).dim() == 3 and sizes == shape
    require(fits, view, f"{where(view)} does not put what is chosen by into {shape[0]} groups of {shape[1]}")
    return count


def is_filled(node: object, value: float) -> bool:
    """A new tensor with one number everywhere."""
    return (value == 0 and is_op(node, *ZEROS)) or (is_op(node, *FULLS) and options_of(node)["fill_value"] == value)
