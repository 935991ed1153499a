"""Residual add and RMSNorm in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.ops.rms_norm.reference import rms_norm


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    cast_last: bool = False,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """→ (rms_norm(x + residual), x + residual); both [..., d]. wide (vLLM): the norm reads the float32 sum, and only
    then is it rounded."""
    if wide:
        total = x.to(torch.float32) + residual.to(torch.float32)
        return rms_norm(total, weight, eps, offset, cast_last, x.dtype), total.to(x.dtype)
    total = x + residual
    return rms_norm(total, weight, eps, offset, cast_last), total
