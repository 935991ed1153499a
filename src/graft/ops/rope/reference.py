"""Rotary position embedding in plain torch, operation for operation what Hugging Face computes."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x: [b, h, s, d] or [b, s, h, d]; cos, sin: [b, 1, s, r] or [b, s, 1, r], or what broadcasts to that, r <= d.
    Packed tokens have no batch: x is [t, h, d] or [h, t, d], cos and sin [t, 1, r] or [1, t, r].

    The first r values of a head rotate, the rest pass through. One angle rotates two values:
    interleaved=False (Llama): x[i] and x[i + r/2], so that cos is [c0, c1, …, c0, c1, …]
    interleaved=True  (GPT-J, GLM, Cohere): x[2i] and x[2i + 1], so that cos is [c0, c0, c1, c1, …]
    """
    r = cos.shape[-1]
    rotating, passing = (x, None) if r == x.shape[-1] else (x[..., :r], x[..., r:])
    result = rotating * cos + rotate_half(rotating, interleaved) * sin
    result = result.to(x.dtype)  # cos may be float32 beside 16-bit heads
    return result.contiguous() if passing is None else torch.cat((result, passing), dim=-1)


def rotate_half(x: Tensor, interleaved: bool) -> Tensor:
    """Every pair (a, b) becomes (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)
