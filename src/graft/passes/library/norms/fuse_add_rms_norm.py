"""fuse_add_rms_norm: the residual add goes into the norm that follows it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graft.ir.nodes import same_shape, tensor_val
from graft.ir.patterns.match import Match, Refused
from graft.ir.patterns.words import one_of, optional
from graft.passes.patterns import PatternTransform, Rewrite
from graft.passes.registry import TransformRegistry

aten, ops = torch.ops.aten, torch.ops.graft
NORM, ADD, CAST = ops.rms_norm.default, aten.add.Tensor, aten.to.dtype


def float32_sum(x: Tensor, residual: Tensor) -> Tensor:
    """In float32, with both summands cast or one of them."""
    return one_of(lambda: x.to(torch.float32) + residual.to(torch.float32), lambda: x.to(torch.float32) + residual)


# ── the norm reads the sum in the working dtype: it was made in that, or in float32 and rounded ─────────────────


def plain(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, cast_last: bool
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return ops.rms_norm(total, weight, eps, offset, cast_last), total


def plain_float32(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, cast_last: bool
) -> tuple[Tensor, Tensor]:
    total = float32_sum(x, residual).to(x.dtype)
    return ops.rms_norm(total, weight, eps, offset, cast_last), total


def plain_fused(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, cast_last: bool
) -> tuple[Tensor, Tensor]:
    return ops.add_rms_norm(x, residual, weight, eps, offset, cast_last)


# ── the norm reads the float32 sum, which is rounded for the next block, or read by none ────────────────────────


def wide(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = float32_sum(x, residual)
    return ops.rms_norm(total, weight, eps, 0.0, False, x.dtype), optional(lambda: total.to(x.dtype))


def wide_fused(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return ops.add_rms_norm(x, residual, weight, eps, 0.0, False, True)


def wide_cast_last(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    total = float32_sum(x, residual)
    return ops.rms_norm(total, weight, eps, offset, True).to(x.dtype), optional(lambda: total.to(x.dtype))


def wide_cast_last_fused(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    return ops.add_rms_norm(x, residual, weight, eps, offset, True, True)


def same_kind(match: Match) -> None:
    x, residual = tensor_val(match.tensors["x"]), tensor_val(match.tensors["residual"])
    if x is None or residual is None or not same_shape(x, residual):
        raise Refused(match.anchor, "the two summands differ in shape, so one is broadcast")
    if x.dtype != residual.dtype:
        raise Refused(match.anchor, f"the summands are {x.dtype} and {residual.dtype}")


def rounds(match: Match) -> None:
    """A sum of float32 that is never rounded is the plain op's, which more kernels and transforms take."""
    same_kind(match)
    x = tensor_val(match.tensors["x"])
    if x is None or x.dtype == torch.float32:
        raise Refused(match.anchor, "the summands are float32, and nothing rounds their sum")


SHAPES = {"x": "b s d", "residual": "b s d", "weight": "d"}
CASTS = (NORM, (ADD, CAST))
# sums with casts first: without its casts each is a sum of float32, too
REWRITES = (
    Rewrite(wide, wide_fused, SHAPES, rounds, needs=CASTS),
    Rewrite(wide_cast_last, wide_cast_last_fused, SHAPES, rounds, needs=CASTS),
    Rewrite(plain_float32, plain_fused, SHAPES, same_kind, needs=CASTS),
    Rewrite(plain, plain_fused, SHAPES, same_kind, needs=((NORM, ADD),)),
)


@TransformRegistry.register("fuse_add_rms_norm")
class FuseAddRMSNorm(PatternTransform):
    """The residual add goes into the norm that follows it; the sum stays readable for the next block.

    before:  %s = add(%x, %residual);  %y = graft.rms_norm(%s, %weight, eps)
    after:   %y, %s = graft.add_rms_norm(%x, %residual, %weight, eps)

    The sum may be made in float32 and rounded before the norm reads it, which gives the same bits, or normed in
    float32 and rounded for the next block alone (vLLM): then the op is told `wide`. Numerics: bitwise with the
    reference; the Triton kernel rounds the sum where eager does.
    """

    def rewrites(self) -> Sequence[Rewrite]:
        return REWRITES
