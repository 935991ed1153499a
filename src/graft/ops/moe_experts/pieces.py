"""What kernels of float and of packed experts share: where an expert's rows are, and what follows its GEMMs."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from graft.ops.swiglu.triton import activate
from graft.ops.triton_math import rounded

UNROLL = 4  # tiles of a program whose loads are issued before the first of them is needed


@dataclass(frozen=True)
class Sizes:
    """Of a program: `rows` of the result, `depth` of the sum at once, and its warps."""

    rows: int
    depth: int
    warps: int


@triton.jit
def find_block(ends, block, e, E: tl.constexpr, ROWS: tl.constexpr):
    """The expert of a block (E or more: there is none), its first row, and where the expert's rows end."""
    experts = tl.arange(0, E)
    end = tl.load(ends + experts, mask=experts < e, other=0)
    start = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < e), other=0)
    blocks = tl.where(experts < e, (end - start + ROWS - 1) // ROWS, 0)
    last_block = tl.cumsum(blocks, axis=0)
    expert = tl.sum((last_block <= block).to(tl.int32), axis=0)
    here = experts == expert
    first = tl.sum(tl.where(here, start + (block - last_block + blocks) * ROWS, 0), axis=0)
    return expert, first, tl.sum(tl.where(here, end, 0), axis=0)


@triton.jit
def clamped_swiglu(gate, up, dtype: tl.constexpr):
    """gpt-oss, rounded to the working dtype after each step as in eager."""
    gate, up = tl.where(gate > 7.0, 7.0, gate), tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
    scaled = (gate * 1.702).to(dtype).to(tl.float32)
    share = (1.0 / (1.0 + tl.exp(-scaled))).to(dtype).to(tl.float32)
    return (up + 1.0).to(dtype).to(tl.float32) * (gate * share).to(dtype).to(tl.float32)


@triton.jit
def store_hidden(
    gate, up, hidden, bias, gate_row, up_row, rows, cols, inside, f, ACTIVATION: tl.constexpr, BIAS: tl.constexpr
):
    """Biases and the activation of a block [rows, cols]; the projections too are rounded as in eager."""
    dtype = hidden.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if BIAS:
        gate += tl.load(bias + gate_row, mask=cols < f, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + up_row, mask=cols < f, other=0.0).to(tl.float32)[None, :]
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if ACTIVATION == "clamped_swiglu":
        result = clamped_swiglu(gate, up, dtype)
    else:
        result = activate(gate, ACTIVATION).to(dtype).to(tl.float32) * up
    target = hidden + rows[:, None].to(tl.int64) * f + cols[None, :]
    tl.store(target, result.to(dtype), mask=inside[:, None] & (cols[None, :] < f))


@triton.jit
def store_pairs(
    result, out, bias, weights, pair, cols, inside, d, dtype: tl.constexpr, BIAS: tl.constexpr, WEIGH: tl.constexpr
):
    """The bias and the weight of each row's pair; `result` is rounded as in eager."""
    if BIAS:
        result += tl.load(bias + cols, mask=cols < d, other=0.0).to(tl.float32)[None, :]
        result = result.to(dtype).to(tl.float32)
    if not WEIGH:
        result = result * tl.load(weights + pair, mask=inside, other=0.0).to(tl.float32)[:, None]
    target = out + pair[:, None] * d + cols[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=inside[:, None] & (cols[None, :] < d))


@triton.jit
def finish_hidden(
    y, z, hidden, bias, expert, pair, row, f, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Biases and the activation of some rows, [rows]; y, z: gate and up, rounded as in eager."""
    dtype = hidden.dtype.element_ty
    if BIAS:
        gate_bias = bias + expert * 2 * f + (2 * row if INTERLEAVED else row)
        up_bias = gate_bias + (1 if INTERLEAVED else f)
        y = rounded(y + tl.load(gate_bias, mask=row < f, other=0.0).to(tl.float32), dtype)
        z = rounded(z + tl.load(up_bias, mask=row < f, other=0.0).to(tl.float32), dtype)
    if ACTIVATION == "clamped_swiglu":
        result = clamped_swiglu(y, z, dtype)
    else:
        result = rounded(activate(y, ACTIVATION), dtype) * z
    tl.store(hidden + pair.to(tl.int64) * f + row, result.to(dtype), mask=row < f)


@triton.jit
def finish_token(
    result, out, bias, weights, expert, pair, inside, token, row, k, d,
    BIAS: tl.constexpr, WEIGH: tl.constexpr, NARROW: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The sum by weight of what a token's experts give, [k, rows], rounded as in eager."""
    if BIAS:
        biases = tl.load(bias + expert[:, None] * d + row[None, :], mask=inside, other=0.0).to(tl.float32)
        result = rounded(result + biases, dtype)
    if not WEIGH:
        result *= tl.load(weights + pair, mask=pair < (token + 1) * k, other=0.0).to(tl.float32)[:, None]
        if NARROW:
            result = rounded(result, dtype)
    summed = tl.sum(tl.where(inside, result, 0.0), axis=0)
    tl.store(out + token.to(tl.int64) * d + row, summed.to(out.dtype.element_ty), mask=row < d)
