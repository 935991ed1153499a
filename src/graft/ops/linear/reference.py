"""A linear layer in plain torch, and the same with 16-bit matrices widened to float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Values of a weight that are widened at a time, 16 MiB of float32. A 49152 x 576 weight as a whole is 4 % faster and
# takes 108 MiB more; in pieces of 1 MiB it takes 1.4 to 1.9 times as long.
PIECE = 2**22


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """x: [..., k], w: [n, k], b: [n] → [..., n]."""
    return F.linear(x, w, b)


def linear_float32(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """As `linear`, summed in float32 and rounded once. No widened weight outlives the call."""
    n, k = w.shape
    rows = x.numel() // k if k else 0
    if rows == 1 and b is None and x.dtype is torch.bfloat16:
        # torch's GEMV of bfloat16 sums in float32 and reads the weight once; that of float16 is slow
        return torch.mv(w, x.reshape(k)).view(*x.shape[:-1], n)
    wide = x.to(torch.float32)
    bias = None if b is None else b.to(torch.float32)
    step = max(PIECE // max(k, 1), 1)
    if step >= n:
        return linear_float32_part(wide, w.to(torch.float32), bias).to(x.dtype, memory_format=torch.contiguous_format)
    out = x.new_empty((*x.shape[:-1], n))
    for first in range(0, n, step):
        part = slice(first, first + step)
        out[..., part] = linear_float32_part(wide, w[part].to(torch.float32), None if bias is None else bias[part])
    return out


def linear_float32_part(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """F.linear in float32. OpenBLAS is faster on few rows with the weight on the left: 1.3 x for 32, 1.5 x for 16."""
    rows = x.numel() // max(x.shape[-1], 1)
    if torch.backends.mkl.is_available() or not 2 <= rows <= 64:
        return F.linear(x, w, b)
    out = torch.mm(w, x.reshape(rows, -1).t()).t().view(*x.shape[:-1], w.shape[0])
    return out if b is None else out + b
