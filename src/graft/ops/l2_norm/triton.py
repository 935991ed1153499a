"""Rows scaled to unit length, one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.launch import dense_rows


@triton.jit
def l2_norm_kernel(x, out, stride_row, d, eps, FORM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < d
    h = tl.load(x + row * stride_row + cols, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(h * h, axis=0)
    if FORM == "sum":
        y = h * tl.rsqrt(total + eps)
    elif FORM == "mean":
        y = h * tl.rsqrt(total / d + eps)
    elif FORM == "max":
        length = tl.sqrt(total)
        y = h / tl.where(length < eps, eps, length)  # NaN stays NaN, as in clamp_min
    else:
        y = h / (tl.sqrt(total) + eps)
    tl.store(out + row * d + cols, y.to(out.dtype.element_ty), mask=mask)


def l2_norm_triton(x: Tensor, eps: float, form: str = "sum") -> Tensor:
    d = x.shape[-1]
    rows = dense_rows(x)  # [n, d]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(d)
    l2_norm_kernel[(rows.shape[0],)](
        rows, out, rows.stride(0), d, eps, FORM=form, BLOCK=block, num_warps=4 if block <= 2048 else 8
    )
    return out
