"""RMSNorm, one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.launch import dense_rows, starts_early


@triton.jit
def rms_norm_kernel(
    x, weight, residual, out, stride_row, stride_r, d, eps, offset, CAST_LAST: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < d
    w = tl.load(weight + cols, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    h = tl.load(x + row * stride_row + cols, mask=mask, other=0.0).to(tl.float32)
    h = h * tl.rsqrt(tl.sum(h * h, axis=0) / d + eps)
    if CAST_LAST:
        y = h * (w.to(tl.float32) + offset)
    else:  # the normalized row is rounded to the working dtype before the product, as in eager
        y = w.to(tl.float32) * h.to(out.dtype.element_ty).to(tl.float32)
    y = y.to(out.dtype.element_ty)
    if RESIDUAL:  # the row is rounded before the sum, as in eager
        r = tl.load(residual + row * stride_r + cols, mask=mask, other=0.0)
        y = (y.to(tl.float32) + r.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row * d + cols, y, mask=mask)


def rms_norm_triton(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    cast_last: bool = False,
    dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    d = x.shape[-1]
    rows = dense_rows(x)  # [n, d]
    others = rows if residual is None else dense_rows(residual)
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    block = triton.next_power_of_2(d)
    warps = 4 if block <= 2048 else 8
    pdl = starts_early(x.device, weight)
    rms_norm_kernel[(rows.shape[0],)](
        rows, weight, others, out, rows.stride(0), others.stride(0), d, eps, offset, CAST_LAST=cast_last,
        RESIDUAL=residual is not None, BLOCK=block, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
