"""Rows of activations as float8, or as two rows of int8 each, with a scale, for GEMMs of quantized weights.

One program a row: norm (as graft::rms_norm rounds it), largest magnitude, division. A sum over the depth does not ask
for an order, so what is multiplied with 8-bit weights is written in theirs (packing.py).

    float8:  x ≈ q * scale                               [tokens, width]
    int8:    x ≈ (coarse + fine / 254) * scale           [tokens, 2, width]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.launch import pdl_supported
from graft.weights.packing import RUN
from graft.weights.quantize import FP8, FP8_TOP, INT8_TOP, least_scale

if TYPE_CHECKING:
    from graft.ops.fused_linear.triton import LinearCall

FINER = 254  # fine steps in a coarse one: half of it is 127, the largest int8
RUN_8, FINER_STEPS = tl.constexpr(RUN), tl.constexpr(FINER)
TOP, TOP_INT8, LEAST = tl.constexpr(FP8_TOP), tl.constexpr(INT8_TOP), tl.constexpr(least_scale(torch.float32))


@triton.jit
def run_columns(PART: tl.constexpr, HALF: tl.constexpr, WORDS: tl.constexpr):
    """Of every span of two runs the one that PART names, or of the row its first or second half: [HALF]."""
    i = tl.arange(0, HALF)
    return i // RUN_8 * (2 * RUN_8) + PART * RUN_8 + i % RUN_8 if WORDS else PART * HALF + i


@triton.jit
def norm_weights(norm, cols, d, WEIGHTED: tl.constexpr):
    return tl.load(norm + cols, mask=cols < d, other=0.0).to(tl.float32) if WEIGHTED else 1.0


@triton.jit
def to_fp8(x, EXACT: tl.constexpr):
    """The nearest float8. EXACT: rounded by arithmetic first, since the conversion of Triton's interpreter loses the
    carry out of a mantissa."""
    if EXACT:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # to 3 bits of mantissa, ties to even
        small = (x + 24576.0) - 24576.0  # multiples of 2^-9, the steps below 2^-6
        x = tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))
        x = tl.minimum(tl.maximum(x, -TOP), TOP)  # the instruction of a device does that
    return x.to(tl.float8e4nv)


@triton.jit
def nearest(x):
    """The nearest whole number, ties to even, of less than 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def store_rounded(out, row, positions, q, width, INT8: tl.constexpr, EXACT: tl.constexpr):
    mask = positions < width
    if INT8:
        coarse = nearest(q)
        tl.store(out + row * 2 * width + positions, coarse.to(tl.int8), mask=mask)
        fine = nearest((q - coarse) * FINER_STEPS)
        tl.store(out + (row * 2 + 1) * width + positions, fine.to(tl.int8), mask=mask)
    else:
        tl.store(out + row * width + positions, to_fp8(q, EXACT), mask=mask)


@triton.jit
def round_rows_kernel(
    x, norm, out, scales, stride_row, d, width, eps, offset,
    NORM: tl.constexpr, WEIGHTED: tl.constexpr, CAST_LAST: tl.constexpr, HALF: tl.constexpr, INT8: tl.constexpr,
    WORDS: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols_0, cols_1 = run_columns(0, HALF, WORDS), run_columns(1, HALF, WORDS)
    weight_0, weight_1 = norm_weights(norm, cols_0, d, WEIGHTED), norm_weights(norm, cols_1, d, WEIGHTED)
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
    round_row(part_0, part_1, out, scales, row, width, HALF, INT8, WORDS, EXACT)


@triton.jit
def round_row(
    part_0, part_1, out, scales, row, width, HALF: tl.constexpr, INT8: tl.constexpr, WORDS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """A row, in two parts as `run_columns` takes it apart, and zeros beyond it: its scale, and what is left.

    Of 8,192 rows the instructions count: each of a value takes as long as 3 % of its bytes."""
    largest = tl.maximum(tl.max(tl.abs(part_0), axis=0), tl.max(tl.abs(part_1), axis=0))
    broken = tl.sum(part_0 * 0.0 + part_1 * 0.0, axis=0)  # NaN where one is no number, which a maximum passes over
    scale = tl.maximum(largest / (TOP_INT8 if INT8 else TOP), LEAST) + broken
    shrink = 1.0 / scale
    part_0, part_1 = part_0 * shrink, part_1 * shrink
    if WORDS:
        store_rounded(out, row, tl.arange(0, 2 * HALF), tl.interleave(part_0, part_1), width, INT8, EXACT)
    else:
        store_rounded(out, row, run_columns(0, HALF, WORDS), part_0, width, INT8, EXACT)
        store_rounded(out, row, run_columns(1, HALF, WORDS), part_1, width, INT8, EXACT)
    tl.store(scales + row, scale)


def round_rows(call: LinearCall, width: int) -> tuple[Tensor, Tensor]:
    """x [tokens, k], normed where the call says so, zeros beyond k, and scales [tokens]: for float8 weights as float8
    [tokens, width], for others as int8 [tokens, 2, width]."""
    tokens, k = call.x.shape
    fp8 = call.kind == "fp8"
    size = (tokens, width) if fp8 else (tokens, 2, width)
    out = torch.empty(size, dtype=FP8 if fp8 else torch.int8, device=call.x.device)
    scales = torch.empty(tokens, dtype=torch.float32, device=call.x.device)
    half = triton.next_power_of_2(width) // 2
    pdl = pdl_supported(call.x.device)
    round_rows_kernel[(tokens,)](
        call.x, call.x if call.norm is None else call.norm, out, scales, call.x.stride(0), k, width, call.eps,
        call.offset, NORM=call.divided, WEIGHTED=call.norm is not None, CAST_LAST=call.cast_last, HALF=half,
        INT8=not fp8, WORDS=call.by_row, EXACT=not call.x.is_cuda, PDL=pdl,
        num_warps=warps_for(half), launch_pdl=pdl,
    )  # fmt: skip
    return out, scales


def warps_for(half: int) -> int:
    """For two times `half` values a program."""
    return 4 if half <= 1024 else 8 if half <= 4096 else 16
