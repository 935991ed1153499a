"""Experts by width: each rank has some columns of every expert, and the router is whole."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.ir.edit import Editor
from graft.ir.nodes import args_of, is_op, options_of, tensor_of, where
from graft.ir.patterns.match import Refused
from graft.passes.library.merge.stacking import is_parameter
from graft.passes.library.shard.splits import share
from graft.passes.library.shard.weights import Shards

ops, TRANSPOSE = torch.ops.graft, torch.ops.aten.transpose.int


def check_experts(gm: GraphModule, node: Node, world: int) -> None:
    given = options_of(node)
    owned = [given[name] for name in ("gate_up", "down", "gate_up_bias", "down_bias") if given[name] is not None]
    if not all(is_parameter(gm, stored(weight)[0]) for weight in owned):
        raise Refused(node, f"a weight of {where(node)} is not a parameter")
    width = int(tensor_of(given["down"]).shape[2])
    if width % world:
        raise Refused(node, f"{where(node)}: experts of width {width} do not divide by {world} ranks")


def stored(weight: Node) -> tuple[Node, bool]:
    """The parameter, and whether it lies as [experts, in, out] (gpt-oss), so that the op reads it transposed."""
    if is_op(weight, TRANSPOSE) and tensor_of(weight).dim() == 3 and {int(d) % 3 for d in weight.args[1:3]} == {1, 2}:
        return weight.args[0], True
    return weight, False


def write_experts(editor: Editor, shards: Shards, node: Node, rank: int, world: int) -> list[Node]:
    """A bias behind the experts is weighed with them, so that it cannot be added behind the sum: rank 0 has it."""
    given: dict[str, Any] = dict(options_of(node))
    width = int(tensor_of(given["down"]).shape[2])
    ((first, last),) = share(width, rank, world)
    rows = ((2 * first, 2 * last),) if given["interleaved"] else ((first, last), (width + first, width + last))
    parts = {"gate_up": (1, rows), "gate_up_bias": (1, rows), "down": (2, ((first, last),))}
    made = []
    for name, (axis, ranges) in parts.items():
        if given[name] is None:
            continue
        weight, transposed = stored(given[name])
        given[name] = shards.part(weight, 3 - axis if transposed else axis, ranges, before=node)
        made.append(given[name])
        if transposed:
            given[name] = editor.call(TRANSPOSE, (given[name], 1, 2), before=node, like=node)
            made.append(given[name])
    if rank:
        given["down_bias"] = None
    partial = editor.call(node.target, args_of(node.target, given, defaults=False), before=node, like=node)
    total = editor.call(ops.all_reduce.default, (partial, world), before=node, like=node)
    editor.replace(node, total)
    return [*made, partial, total]
