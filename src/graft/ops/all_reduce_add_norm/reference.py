"""The sum over the ranks, the residual and the RMSNorm behind it, one after the other."""

from __future__ import annotations

from torch import Tensor

from graft.ops.add_rms_norm.reference import add_rms_norm
from graft.ops.all_reduce.reference import all_reduce


def all_reduce_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    world: int,
    eps: float,
    offset: float = 0.0,
    cast_last: bool = False,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """x: the part of this rank, [..., d]; residual: equal on all → (rms_norm(s), s) of s = sum of all parts +
    residual, as graft::add_rms_norm rounds them."""
    return add_rms_norm(all_reduce(x, world), residual, weight, eps, offset, cast_last, wide)
