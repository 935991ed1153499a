"""Rows scaled to unit length in plain torch. What differs between models is where eps keeps the divisor from 0."""

from __future__ import annotations

import torch
from torch import Tensor

FORMS = ("sum", "mean", "max", "plus")


def l2_norm(x: Tensor, eps: float, form: str = "sum") -> Tensor:
    """x: [..., d]; computed in float32, rounded once.

    sum (delta rules): x · rsqrt(Σ x² + eps).  mean (Llama 4): x · rsqrt(Σ x² / d + eps), a row of length √d.
    max (F.normalize): x / max(‖x‖, eps).      plus: x / (‖x‖ + eps).
    """
    h = x.to(torch.float32)
    if form in ("sum", "mean"):
        square = h.pow(2)
        total = square.sum(-1, keepdim=True) if form == "sum" else square.mean(-1, keepdim=True)
        return (h * torch.rsqrt(total + eps)).to(x.dtype)
    if form not in FORMS:
        raise ValueError(f"form is one of {', '.join(FORMS)}, not {form!r}")
    length = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
    return (h / (length.clamp_min(eps) if form == "max" else length + eps)).to(x.dtype)
