"""fuse_all_reduce_norm: the sum over the ranks goes into the residual's norm that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from graft.ir.nodes import calls, is_op, same_shape, tensor_of, where
from graft.ir.patterns.match import Match, Refused
from graft.ir.patterns.words import one_of, optional
from graft.passes.base import Context, NumericChecker
from graft.passes.library.matvec.linears import named
from graft.passes.library.shard.checking import check_exchanges
from graft.passes.patterns import PatternTransform, Rewrite
from graft.passes.registry import TransformRegistry

ops = torch.ops.graft
ALL_REDUCE, ADD_NORM = ops.all_reduce.default, ops.add_rms_norm.default


def summed(
    x: Tensor, residual: Tensor, weight: Tensor, world: int, eps: float, offset: float, cast_last: bool, wide: bool
) -> tuple[Tensor, Tensor]:
    total = ops.all_reduce(x, world)
    summands = one_of(lambda: (total, residual), lambda: (residual, total))
    normed, both = ops.add_rms_norm(*summands, weight, eps, offset, cast_last, wide)
    return normed, optional(lambda: both)


def summed_fused(
    x: Tensor, residual: Tensor, weight: Tensor, world: int, eps: float, offset: float, cast_last: bool, wide: bool
) -> tuple[Tensor, Tensor]:
    return ops.all_reduce_add_norm(x, residual, weight, world, eps, offset, cast_last, wide)


def same_kind(match: Match) -> None:
    """Rows of one shape and dtype: the exchange knows no others."""
    x, residual = match.tensors["x"], match.tensors["residual"]
    if not same_shape(tensor_of(x), tensor_of(residual)):
        raise Refused(residual, f"the residual {where(residual)} is broadcast to the sum over the ranks")
    if tensor_of(x).dtype != tensor_of(residual).dtype:
        raise Refused(
            residual, f"the sum over the ranks is {tensor_of(x).dtype}, the residual {tensor_of(residual).dtype}"
        )


SHAPES = {"x": "b s d", "residual": "b s d", "weight": "d"}
REWRITES = (Rewrite(summed, summed_fused, SHAPES, same_kind, needs=((ADD_NORM, ALL_REDUCE),)),)


@TransformRegistry.register("fuse_all_reduce_norm")
class FuseAllReduceNorm(PatternTransform):
    """What the ranks exchange behind a row-split layer is summed, added to the residual and normed by one op.

    before:  %t = graft.all_reduce(%p, world);  %n, %s = graft.add_rms_norm(%t, %r, %g, eps)
    after:   %n, %s = graft.all_reduce_add_norm(%p, %r, %g, world, eps)

    One kernel can then write a row for the other ranks, read theirs, and norm their sum while it is at hand. A sum
    that something else reads stays, and so does one with a bias, a factor, a reshape or another norm between it and
    the residual. Numerics: bitwise with the group's own sum; the kernel over peer memory adds up in float32, in the
    order of the ranks, and rounds once.
    """

    lacking = "the graph has no graft::all_reduce, as of a model on one rank"
    explained = (ALL_REDUCE,)

    def applies(self, gm: GraphModule, context: Context) -> str | None:
        return None if any(is_op(node, ALL_REDUCE) for node in calls(gm.graph)) else self.lacking

    def rewrites(self) -> Sequence[Rewrite]:
        return REWRITES

    def explain(self, node: Node) -> None:
        """A sum over the ranks that is left, and what reads it instead."""
        readers = list(node.users)
        if len(readers) > 1:
            raise Refused(node, f"{where(node)} is read by {len(readers)} calls")
        if not is_op(readers[0], ADD_NORM):
            raise Refused(node, f"{where(node)} is read by {named(readers[0])}, not by graft::add_rms_norm")

    def own_check(self, context: Context) -> NumericChecker:
        """Of ranks that are threads: one by itself has nobody to exchange with."""
        return partial(check_exchanges, exchange=ALL_REDUCE)
