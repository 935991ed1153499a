"""fuse_add_rms_norm: the residual add goes into the norm that follows it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graft.graph.match import Match
from graft.graph.nodes import same_shape, tensor_val
from graft.transforms.base import PatternTransform, Rewrite
from graft.transforms.registry import TransformRegistry


def plain(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return torch.ops.graft.rms_norm(total, weight, eps), total


def plain_fused(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.ops.graft.add_rms_norm(x, residual, weight, eps)


def cast_last(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return torch.ops.graft.rms_norm(total, weight, eps, offset, True), total


def cast_last_fused(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    return torch.ops.graft.add_rms_norm(x, residual, weight, eps, offset, True)


def same_kind(match: Match) -> str | None:
    x, residual = tensor_val(match.tensors["x"]), tensor_val(match.tensors["residual"])
    if x is None or residual is None or not same_shape(x, residual):
        return "the two summands differ in shape, so one is broadcast"
    return None if x.dtype == residual.dtype else f"the summands are {x.dtype} and {residual.dtype}"


NEEDS = (torch.ops.graft.rms_norm.default,)
SHAPES = {"x": "b s d", "residual": "b s d", "weight": "d"}


@TransformRegistry.register("fuse_add_rms_norm")
class FuseAddRMSNorm(PatternTransform):
    """The residual add goes into the norm that follows it; the sum stays readable for the next block.

    before:  %s = add(%x, %residual);  %y = graft.rms_norm(%s, %weight, eps)
    after:   %y, %s = graft.add_rms_norm(%x, %residual, %weight, eps)

    Numerics: bitwise with the reference; the Triton kernel rounds the sum to the working dtype before the norm
    reads it, as eager does.
    """

    def rewrites(self) -> Sequence[Rewrite]:
        return [
            Rewrite(plain, plain_fused, SHAPES, same_kind, needs=NEEDS),
            Rewrite(cast_last, cast_last_fused, SHAPES, same_kind, needs=NEEDS),
        ]
