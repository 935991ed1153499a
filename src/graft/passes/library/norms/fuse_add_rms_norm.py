"""fuse_add_rms_norm: the residual add goes into the norm that follows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from graft.ir.nodes import same_shape, tensor_val
from graft.ir.patterns.match import Match, Refused
from graft.passes.patterns import PatternTransform, Rewrite
from graft.passes.registry import TransformRegistry

Pattern = Callable[..., Any]


# ── the sum: in the working dtype, or in float32 with one summand cast or both ──────────────────────────────────


def working(x: Tensor, residual: Tensor) -> Tensor:
    return x + residual


def both_cast(x: Tensor, residual: Tensor) -> Tensor:
    return x.to(torch.float32) + residual.to(torch.float32)


def one_cast(x: Tensor, residual: Tensor) -> Tensor:
    return x.to(torch.float32) + residual


SUMS = {"": working, "_promoted": one_cast, "_float32": both_cast}


# ── the norm reads the sum that was rounded ─────────────────────────────────────────────────────────────────────


def plain(add: Callable[[Tensor, Tensor], Tensor]) -> Pattern:
    def pattern(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = add(x, residual).to(x.dtype)
        return torch.ops.graft.rms_norm(total, weight, eps), total

    return pattern


def plain_fused(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.ops.graft.add_rms_norm(x, residual, weight, eps)


def cast_last(add: Callable[[Tensor, Tensor], Tensor]) -> Pattern:
    def pattern(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        total = add(x, residual).to(x.dtype)
        return torch.ops.graft.rms_norm(total, weight, eps, offset, True), total

    return pattern


def cast_last_fused(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    return torch.ops.graft.add_rms_norm(x, residual, weight, eps, offset, True)


# ── the norm reads the float32 sum, which is rounded for the next block, or read by none ────────────────────────


def wide(add: Callable[[Tensor, Tensor], Tensor]) -> Pattern:
    def pattern(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = add(x, residual)
        return torch.ops.graft.rms_norm(total, weight, eps, 0.0, False, x.dtype), total.to(x.dtype)

    return pattern


def wide_fused(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.ops.graft.add_rms_norm(x, residual, weight, eps, 0.0, False, True)


def wide_cast_last(add: Callable[[Tensor, Tensor], Tensor]) -> Pattern:
    def pattern(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        total = add(x, residual)
        return torch.ops.graft.rms_norm(total, weight, eps, offset, True).to(x.dtype), total.to(x.dtype)

    return pattern


def wide_cast_last_fused(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    return torch.ops.graft.add_rms_norm(x, residual, weight, eps, offset, True, True)


def normed(function: Pattern) -> Pattern:
    """Of the two results the first alone: the last norm of a model."""

    @wraps(function)
    def pattern(*args: Any, **literals: Any) -> Tensor:
        return function(*args, **literals)[0]

    return pattern


def named(function: Pattern, name: str) -> Pattern:
    function.__name__ = name
    return function


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


NEEDS = (torch.ops.graft.rms_norm.default,)
CASTS = (torch.ops.graft.rms_norm.default, torch.ops.aten.to.dtype)
SHAPES = {"x": "b s d", "residual": "b s d", "weight": "d"}


def rewrites() -> list[Rewrite]:
    """Sums with casts first: without its casts each is a sum of float32, too."""
    found = []
    for suffix, add in reversed(SUMS.items()):
        needs = CASTS if suffix else NEEDS
        for kind, fused in ((wide, wide_fused), (wide_cast_last, wide_cast_last_fused)) if suffix else ():
            pattern = named(kind(add), kind.__name__ + suffix)
            alone = named(normed(kind(add)), f"{kind.__name__}{suffix}_alone")
            found.append(Rewrite(pattern, fused, SHAPES, rounds, needs=needs))
            found.append(Rewrite(alone, normed(fused), SHAPES, rounds, needs=needs))
        for kind, fused in ((plain, plain_fused), (cast_last, cast_last_fused)):
            found.append(Rewrite(named(kind(add), kind.__name__ + suffix), fused, SHAPES, same_kind, needs=needs))
    return found


REWRITES = rewrites()


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
