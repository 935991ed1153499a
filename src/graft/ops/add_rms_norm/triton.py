"""Residual add and RMSNorm in one pass over the row, one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.launch import dense_rows, starts_early


@triton.jit
def add_rms_norm_kernel(
    x, residual, weight, out, total, stride_x, stride_r, d, eps, offset, CAST_LAST: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < d
    w = tl.load(weight + cols, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    a = tl.load(x + row * stride_x + cols, mask=mask, other=0.0)
    b = tl.load(residual + row * stride_r + cols, mask=mask, other=0.0)
    h = a.to(tl.float32) + b.to(tl.float32)
    s = h.to(out.dtype.element_ty)
    tl.store(total + row * d + cols, s, mask=mask)
    if not WIDE:  # rounded to the working dtype first: the norm sees what later readers of the sum see
        h = s.to(tl.float32)
    h = h * tl.rsqrt(tl.sum(h * h, axis=0) / d + eps)
    if CAST_LAST:
        y = h * (w.to(tl.float32) + offset)
    else:  # the normalized row is rounded to the working dtype before the product, as in eager
        y = w.to(tl.float32) * h.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * d + cols, y.to(out.dtype.element_ty), mask=mask)


def add_rms_norm_triton(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    cast_last: bool = False,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    d = x.shape[-1]
    rows, others = dense_rows(x), dense_rows(residual)  # [n, d]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    block = triton.next_power_of_2(d)
    warps = 4 if block <= 2048 else 8
    pdl = starts_early(x.device, weight)
    add_rms_norm_kernel[(rows.shape[0],)](
        rows, others, weight, out, total, rows.stride(0), others.stride(0), d, eps, offset,
        CAST_LAST=cast_last, WIDE=wide, BLOCK=block, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out, total
