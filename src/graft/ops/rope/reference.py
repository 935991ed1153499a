"""Rotary position embedding (half-rotated) in plain torch, operation for operation what Hugging Face computes."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [b, h, s, d]; cos, sin: [b, 1, s, r], r <= d. The first r values of a head turn, the rest pass through."""
    r = cos.shape[-1]
    turning, passing = (x, None) if r == x.shape[-1] else (x[..., :r], x[..., r:])
    half = r // 2
    turned = torch.cat((-turning[..., half:], turning[..., :half]), dim=-1)
    result = (turning * cos + turned * sin).to(x.dtype)  # cos may be float32 beside 16-bit heads
    return result.contiguous() if passing is None else torch.cat((result, passing), dim=-1)
