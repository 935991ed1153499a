"""join_copies: a new tensor that is filled part by part becomes one cat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.fx import Node

from graft.ir.effects import storage_root
from graft.ir.nodes import calls, is_op, options_of, same_shape, same_sizes, slice_args, static_int, tensor_of, where
from graft.ir.patterns.match import Match, Refused
from graft.passes.registry import TransformRegistry
from graft.passes.rewriter import Rewriter, RewriteRun

aten = torch.ops.aten
# what is in them does not matter where all of it is written over
LIKE = (aten.new_empty.default, aten.empty_like.default, aten.new_zeros.default, aten.zeros_like.default)
NEW = (*LIKE, aten.empty.memory_format, aten.zeros.default)
SLICE, COPY, CAT = aten.slice.Tensor, aten.copy_.default, aten.cat.default


@dataclass(frozen=True)
class FilledPart:
    """`copy` writes `source` into `piece`, the positions from `start` to `end` of axis `dim`."""

    dim: int
    start: int
    end: int
    piece: Node
    copy: Node

    @property
    def source(self) -> Node:
        return self.copy.args[1]


@TransformRegistry.register("join_copies")
class JoinCopies(Rewriter):
    """What DeepSeek does with keys, of which a part is rotated and shared by all heads:

    before:  %k = new_empty(%x, [b, h, s, 24])
             copy_(slice(%k, -1, 0, 16), %k_pass)
             copy_(slice(%k, -1, 16, 24), %k_rot)
    after:   %k = cat([%k_pass, %k_rot], -1)

    One kernel for all parts, no write in place that others would have to look out for, and a form that
    shard_tensor_parallel can split by heads. Zeros that are written over count as empty memory.

    Numerics: copies, bit for bit, in the same layout.

    A walk: how many parts there are, and in which order they are written, a pattern cannot say.
    """

    lacking = "no new tensor is filled part by part"
    size = 5

    def candidates(self, run: RewriteRun) -> list[Node]:
        return [
            node for node in calls(run.gm.graph) if is_op(node, *NEW) and any(filled(user) for user in node.users)
        ]

    def find(self, run: RewriteRun, new: Node) -> Match:
        parts = sorted((part_of(user) for user in new.users if filled(user)), key=lambda part: part.start)
        check_cover(new, parts)
        for part in parts:
            check_source(new, part)
        check_layout(new, parts)
        last = max(part.copy for part in parts)
        early = next((user for user in new.users if user < last and not filled(user)), None)
        if early is not None:
            raise Refused(early, f"{where(early)} reads {where(new)} before all of it is written")
        inside = [node for part in parts for node in (part.piece, part.copy)]
        sources = {f"part_{number}": part.source for number, part in enumerate(parts)}
        return Match("", sources, {"dim": parts[0].dim}, (new, *inside), (new,))

    def write(self, run: RewriteRun, match: Match) -> list[Node]:
        new, *inside = match.nodes
        joined = (list(match.tensors.values()), match.literals["dim"])
        made = run.editor.call(CAT, joined, before=max(inside), like=new)
        run.editor.replace(new, made)
        run.mutated.add(made)  # what is written into the whole later on is written into it
        return [made]


def filled(user: Node) -> bool:
    """Whether this reader of a tensor is a piece of it that is written once, and nothing else."""
    copies = list(user.users)
    return is_op(user, SLICE) and len(copies) == 1 and is_op(copies[0], COPY) and copies[0].args[0] is user


def part_of(piece: Node) -> FilledPart:
    (copy,), (dim, start, end, step) = piece.users, slice_args(piece)
    size = static_int(tensor_of(piece.args[0]).shape[dim])
    if size is None or start is None or end is None or step != 1:
        raise Refused(piece, f"{where(piece)}: where it begins and ends is not known")
    if copy.users:
        raise Refused(copy, f"{where(copy)} gives a result that is read")
    return FilledPart(dim, start, end, piece, copy)


def check_cover(new: Node, parts: Sequence[FilledPart]) -> None:
    """All of it is written, along one axis, and nothing twice; and it follows the dtype of what is written."""
    if not is_op(new, *LIKE) or options_of(new)["dtype"] is not None:
        raise Refused(new, f"{where(new)} has a dtype of its own, whatever is copied into it")
    dims = sorted({part.dim for part in parts})
    if len(dims) > 1:
        raise Refused(new, f"{where(new)} is filled along the axes {' and '.join(map(str, dims))}")
    size = int(tensor_of(new).shape[dims[0]])
    edges = [0, *(edge for part in parts for edge in (part.start, part.end)), size]
    for end, start in list(pairwise(edges))[::2]:
        if start > end:
            raise Refused(new, f"{where(new)}: positions {end} to {start} of axis {dims[0]} are not written")
        if start < end:
            raise Refused(new, f"{where(new)}: positions {start} to {end} of axis {dims[0]} are written twice")


def check_source(new: Node, part: FilledPart) -> None:
    source, piece = tensor_of(part.source), tensor_of(part.piece)
    if storage_root(part.source) is new:
        raise Refused(part.copy, f"{where(part.copy)} copies a part of {where(new)} into another")
    if (source.dtype, source.device) != (piece.dtype, piece.device):
        raise Refused(part.copy, f"{where(part.copy)} casts {source.dtype} on {source.device} as it copies")
    if not same_shape(source, piece):
        raise Refused(part.copy, f"{where(part.copy)} repeats {list(source.shape)} over {list(piece.shape)}")


def check_layout(new: Node, parts: Sequence[FilledPart]) -> None:
    """cat lays its result out as its inputs are; views of what was there, and who gets it, rely on the old layout."""
    joined = torch.cat([tensor_of(part.source) for part in parts], parts[0].dim)
    if not same_sizes(joined.stride(), tensor_of(new).stride()):
        raise Refused(
            new, f"{where(new)} has the strides {list(tensor_of(new).stride())}, which cat would not give it"
        )
