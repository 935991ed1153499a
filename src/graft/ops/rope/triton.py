"""Rotary embedding, one program a head and token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.triton_math import rounded


@triton.jit
def rotate_pairs(first, second, cos, sin, i, j, mask, dtype: tl.constexpr, ROUND: tl.constexpr):
    """The pairs (first, second) rotated: `i` and `j` say where cos and sin hold their angles."""
    cos_i = tl.load(cos + i, mask=mask, other=0.0).to(tl.float32)
    cos_j = tl.load(cos + j, mask=mask, other=0.0).to(tl.float32)
    sin_i = tl.load(sin + i, mask=mask, other=0.0).to(tl.float32)
    sin_j = tl.load(sin + j, mask=mask, other=0.0).to(tl.float32)
    a, b, c, d = first * cos_i, second * sin_i, second * cos_j, first * sin_j
    if ROUND:  # eager rounds each product to the working dtype before the sum
        a, b, c, d = rounded(a, dtype), rounded(b, dtype), rounded(c, dtype), rounded(d, dtype)
    return a - b, c + d


@triton.jit
def rope_kernel(
    x,
    cos,
    sin,
    out,
    rows,
    columns,
    d,
    r,
    sx_0,
    sx_1,
    sx_2,
    sc_0,
    sc_1,
    sc_2,
    ss_0,
    ss_1,
    ss_2,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    ROUND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    k = pid % columns
    j = (pid // columns) % rows
    i = pid // (columns * rows)
    source = x + i * sx_0 + j * sx_1 + k * sx_2
    target = out + pid * d
    half = r // 2
    cols = tl.arange(0, HALF)
    mask = cols < half
    if INTERLEAVED:
        one, two = 2 * cols, 2 * cols + 1
    else:
        one, two = cols, half + cols
    first = tl.load(source + one, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + two, mask=mask, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    cos_row = cos + i * sc_0 + j * sc_1 + k * sc_2
    sin_row = sin + i * ss_0 + j * ss_1 + k * ss_2
    first, second = rotate_pairs(first, second, cos_row, sin_row, one, two, mask, dtype, ROUND)
    tl.store(target + one, first.to(dtype), mask=mask)
    tl.store(target + two, second.to(dtype), mask=mask)
    if REST > 0:
        rest = r + tl.arange(0, REST)
        tl.store(target + rest, tl.load(source + rest, mask=rest < d, other=0.0), mask=rest < d)


def rope_triton(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    if x.dim() == 3:  # packed tokens are a batch of one
        return rope_triton(x.unsqueeze(0), cos, sin, interleaved).squeeze(0)
    d, r = x.shape[-1], cos.shape[-1]
    cos, sin = (spread(angles, x) for angles in (cos, sin))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # [b, h, s, d] or [b, s, h, d], as x
    rope_kernel[(x.shape[0] * x.shape[1] * x.shape[2],)](
        x, cos, sin, out, x.shape[1], x.shape[2], d, r, *x.stride()[:3], *cos.stride()[:3], *sin.stride()[:3],
        HALF=triton.next_power_of_2(r // 2), REST=triton.next_power_of_2(d - r) if d > r else 0,
        ROUND=torch.promote_types(x.dtype, cos.dtype) == x.dtype, INTERLEAVED=interleaved, num_warps=1,
    )  # fmt: skip
    return out


def spread(angles: Tensor, x: Tensor) -> Tensor:
    """cos or sin over the first three dims of x, without copying: strides of 0 where they are shared."""
    angles = angles if angles.stride(-1) == 1 else angles.contiguous()
    return angles.expand(*x.shape[:3], angles.shape[-1])
