"""fuse_residual_into_norm: the residual sum after the norm of a block's result becomes a part of that norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from graft.ir.nodes import is_op, options_of, same_shape, tensor_of, where
from graft.ir.patterns.match import Match, Refused
from graft.ir.patterns.words import one_of, optional
from graft.passes.library.matvec.linears import MatvecPatterns
from graft.passes.patterns import Rewrite
from graft.passes.registry import TransformRegistry

aten, ops = torch.ops.aten, torch.ops.graft
NORM, ADD, ADD_NORM = ops.rms_norm.default, aten.add.Tensor, ops.add_rms_norm.default


def added(x: Tensor, weight: Tensor, residual: Tensor, eps: float, offset: float, cast_last: bool) -> Tensor:
    return ops.rms_norm(x, weight, eps, offset, cast_last) + residual


def added_fused(x: Tensor, weight: Tensor, residual: Tensor, eps: float, offset: float, cast_last: bool) -> Tensor:
    return ops.rms_norm(x, weight, eps, offset, cast_last, None, residual)


def normed_again(
    x: Tensor, weight: Tensor, residual: Tensor, eps: float, offset: float, cast_last: bool, norm: Tensor,
    next_eps: float, next_offset: float, next_cast_last: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    row = ops.rms_norm(x, weight, eps, offset, cast_last)
    summands = one_of(lambda: (row, residual), lambda: (residual, row))
    normed, total = ops.add_rms_norm(*summands, norm, next_eps, next_offset, next_cast_last)
    return normed, optional(lambda: total)


def normed_again_fused(
    x: Tensor, weight: Tensor, residual: Tensor, eps: float, offset: float, cast_last: bool, norm: Tensor,
    next_eps: float, next_offset: float, next_cast_last: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    total = added_fused(x, weight, residual, eps, offset, cast_last)
    return ops.rms_norm(total, norm, next_eps, next_offset, next_cast_last), total


def check_sum(match: Match) -> None:
    norm = next(node for node in match.nodes if is_op(node, NORM))
    row, residual = tensor_of(norm), match.tensors["residual"]
    if not same_shape(row, tensor_of(residual)):
        raise Refused(residual, f"the residual {where(residual)} is broadcast to the norm's result")
    if row.dtype != tensor_of(residual).dtype:
        raise Refused(
            residual, f"the residual {where(residual)} is {tensor_of(residual).dtype}, the norm {row.dtype}"
        )


SHAPES = {"x": "b s d", "weight": "d", "residual": "b s d"}
REWRITES = (
    Rewrite(
        normed_again,
        normed_again_fused,
        SHAPES | {"norm": "d"},
        check_sum,
        needs=((ADD_NORM, NORM),),
        origin="weight",
    ),
    Rewrite(added, added_fused, SHAPES, check_sum, needs=((ADD, NORM),), origin="weight"),
)


@TransformRegistry.register("fuse_residual_into_norm")
class FuseResidualIntoNorm(MatvecPatterns):
    """The residual sum after the norm of a block's result becomes a part of that norm; the next one stands alone.

    before:  %y = graft.rms_norm(%b, %g, eps);  %n, %x = graft.add_rms_norm(%y, %r, %h, eps)
    after:   %x = graft.rms_norm(%b, %g, eps, residual=%r);  %n = graft.rms_norm(%x, %h, eps)

    Also a plain `add(%y, %r)`. Gemma and OLMo 2 norm what attention and the MLP give before they add it: a norm that
    stands alone goes into the linear layers behind it, so that two kernels become one. Numerics: bitwise.
    """

    lacking = "no norm of a block's result is followed by a sum"
    explained = (ADD_NORM,)

    def rewrites(self) -> Sequence[Rewrite]:
        return REWRITES

    def explain(self, node: Node) -> None:
        norms = [value for value in node.args[:2] if is_op(value, NORM)]
        if norms and options_of(node)["wide"]:
            raise Refused(node, f"{where(node)} norms the sum before it is rounded")
        if norms and len(norms[0].users) > 1:
            raise Refused(node, f"{where(norms[0])} is read by {len(norms[0].users)} calls")
