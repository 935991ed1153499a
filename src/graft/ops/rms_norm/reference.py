"""RMSNorm in plain torch, operation for operation what Hugging Face models compute."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    cast_last: bool = False,
    dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x: [..., d], weight: [d]. Statistics in float32. dtype: what the row is rounded to instead of x's own, for rows
    that come in float32 (a gated norm, a sum that was not rounded). residual: [..., d], added to the rounded row.

    cast_last=False (Llama): weight * normalized.to(x.dtype)
    cast_last=True  (Gemma, OLMo 2): (normalized * (weight.float() + offset)).to(x.dtype)
    """
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if not cast_last:
        row = weight * h.to(dtype or x.dtype)
    else:
        scale = weight.to(torch.float32)
        row = (h * (scale + offset if offset else scale)).to(dtype or x.dtype)
    return row if residual is None else row + residual
