"""Rows of activations as float8, each with a scale of its own, in the order of packed weights (packing.py).

One program a row: norm (as graft::rms_norm rounds it), largest magnitude, division. A sum over the depth does not ask
for an order, so what is multiplied with packed weights is written in theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.launch import pdl_supported
from graft.weights.packing import RUN
from graft.weights.quantize import FP8, FP8_TOP, least_scale

if TYPE_CHECKING:
    from graft.ops.fused_linear.triton import LinearCall

RUN_8 = tl.constexpr(RUN)
TOP, LEAST = tl.constexpr(FP8_TOP), tl.constexpr(least_scale(torch.float32))


@triton.jit
def load_run(norm, d, PART: tl.constexpr, HALF: tl.constexpr, WEIGHTED: tl.constexpr):
    """Of every span of two runs the one that PART names: where it lies, and the norm's weights for it. [HALF]."""
    i = tl.arange(0, HALF)
    cols = i // RUN_8 * (2 * RUN_8) + PART * RUN_8 + i % RUN_8
    weight = tl.load(norm + cols, mask=cols < d, other=0.0).to(tl.float32) if WEIGHTED else 1.0
    return cols, weight


@triton.jit
def to_fp8(x, EXACT: tl.constexpr):
    """The nearest float8. EXACT: rounded by arithmetic first, since the conversion of Triton's interpreter loses the
    carry out of a mantissa."""
    if EXACT:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # to 3 bits of mantissa, ties to even
        small = (x + 24576.0) - 24576.0  # multiples of 2^-9, the steps below 2^-6
        x = tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return tl.minimum(tl.maximum(x, -TOP), TOP).to(tl.float8e4nv)


@triton.jit
def round_rows_kernel(
    x, norm, out, scales, stride_row, d, width, eps, offset,
    NORM: tl.constexpr, WEIGHTED: tl.constexpr, CAST_LAST: tl.constexpr, HALF: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols_0, weight_0 = load_run(norm, d, 0, HALF, WEIGHTED)
    cols_1, weight_1 = load_run(norm, d, 1, HALF, WEIGHTED)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dtype = x.dtype.element_ty
    part_0 = tl.load(x + row * stride_row + cols_0, mask=cols_0 < d, other=0.0).to(tl.float32)
    part_1 = tl.load(x + row * stride_row + cols_1, mask=cols_1 < d, other=0.0).to(tl.float32)
    if NORM:
        total = tl.sum(part_0 * part_0, axis=0) + tl.sum(part_1 * part_1, axis=0)
        shrink = tl.rsqrt(total / d + eps)
        part_0, part_1 = part_0 * shrink, part_1 * shrink
        if CAST_LAST:
            part_0, part_1 = part_0 * (weight_0 + offset), part_1 * (weight_1 + offset)
        else:
            part_0 = weight_0 * part_0.to(dtype).to(tl.float32)
            part_1 = weight_1 * part_1.to(dtype).to(tl.float32)
        part_0, part_1 = part_0.to(dtype).to(tl.float32), part_1.to(dtype).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(part_0), axis=0), tl.max(tl.abs(part_1), axis=0))
    scale = tl.maximum(largest / TOP, LEAST)
    broken = tl.max(((part_0 != part_0) | (part_1 != part_1)).to(tl.int32), axis=0)  # a maximum passes over NaN
    scale = tl.where(broken > 0, float("nan"), scale)
    q = tl.interleave(part_0 / scale, part_1 / scale)  # the order of words, [2 * HALF]
    positions = tl.arange(0, 2 * HALF)
    tl.store(out + row * width + positions, to_fp8(q, EXACT), mask=positions < width)
    tl.store(scales + row, scale)


def round_rows(call: LinearCall, width: int) -> tuple[Tensor, Tensor]:
    """x [tokens, k], normed where the call says so → float8 [tokens, width], zeros beyond k, and scales [tokens]."""
    tokens, k = call.x.shape
    out = torch.empty((tokens, width), dtype=FP8, device=call.x.device)
    scales = torch.empty(tokens, dtype=torch.float32, device=call.x.device)
    half = triton.next_power_of_2(width) // 2
    pdl = pdl_supported(call.x.device)
    round_rows_kernel[(tokens,)](
        call.x, call.x if call.norm is None else call.norm, out, scales, call.x.stride(0), k, width, call.eps,
        call.offset, NORM=call.divided, WEIGHTED=call.norm is not None, CAST_LAST=call.cast_last, HALF=half,
        EXACT=not call.x.is_cuda, PDL=pdl, num_warps=4 if half <= 1024 else 8 if half <= 4096 else 16, launch_pdl=pdl,
    )  # fmt: skip
    return out, scales
