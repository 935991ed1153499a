"""Residual add and RMSNorm in plain torch."""

from __future__ import annotations

from torch import Tensor

from graft.ops.rms_norm.reference import rms_norm


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, cast_last: bool = False
) -> tuple[Tensor, Tensor]:
    """→ (rms_norm(x + residual), x + residual); both [..., d]."""
    total = x + residual
    return rms_norm(total, weight, eps, offset, cast_last), total
