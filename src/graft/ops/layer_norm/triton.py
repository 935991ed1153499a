"""LayerNorm, one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.launch import dense_rows, starts_early


@triton.jit
def layer_norm_kernel(
    x, weight, bias, out, stride_row, d, eps, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < d
    # of weights alone, so ahead of the wait
    w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32) if HAS_WEIGHT else 1.0
    b = tl.load(bias + cols, mask=mask, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    h = tl.load(x + row * stride_row + cols, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, h - tl.sum(h, axis=0) / d, 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / d + eps)
    y = y * w + b
    tl.store(out + row * d + cols, y.to(out.dtype.element_ty), mask=mask)


def layer_norm_triton(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *_: object) -> Tensor:
    """The rest of the op's arguments say how the model rounds; the kernel is float32 inside and rounds once."""
    d = x.shape[-1]
    rows = dense_rows(x)  # [n, d]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(d)
    pdl = starts_early(x.device, weight, bias)
    layer_norm_kernel[(rows.shape[0],)](
        rows, rows if weight is None else weight, rows if bias is None else bias, out, rows.stride(0), d, eps,
        HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, BLOCK=block, PDL=pdl,
        num_warps=4 if block <= 2048 else 8, launch_pdl=pdl,
    )  # fmt: skip
    return out
