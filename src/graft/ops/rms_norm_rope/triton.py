"""RMSNorm and rotary embedding in one pass, one program a head and token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.rope.triton import spread, turn_pairs


@triton.jit
def normed(h, scale, weight, cols, mask, offset, dtype: tl.constexpr, CAST_LAST: tl.constexpr):
    """Values of a head after the norm, rounded to the working dtype as eager does."""
    w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    if CAST_LAST:
        y = h * scale * (w + offset)
    else:
        y = w * (h * scale).to(dtype).to(tl.float32)
    return y.to(dtype).to(tl.float32)


@triton.jit
def rms_norm_rope_kernel(
    x,
    weight,
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
    eps,
    offset,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    ROUND: tl.constexpr,
    CAST_LAST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    k = pid % columns
    j = (pid // columns) % rows
    i = pid // (columns * rows)
    source = x + i * sx_0 + j * sx_1 + k * sx_2
    target = out + pid * d
    dtype = out.dtype.element_ty
    half = r // 2
    cols = tl.arange(0, HALF)
    mask = cols < half
    if INTERLEAVED:
        one, two = 2 * cols, 2 * cols + 1
    else:
        one, two = cols, half + cols
    first = tl.load(source + one, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + two, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(first * first + second * second, axis=0)
    rest = r + tl.arange(0, REST)  # none of them below d where the whole head turns
    tail = tl.load(source + rest, mask=rest < d, other=0.0).to(tl.float32)
    total += tl.sum(tail * tail, axis=0)
    scale = tl.rsqrt(total / d + eps)
    first = normed(first, scale, weight, one, mask, offset, dtype, CAST_LAST)
    second = normed(second, scale, weight, two, mask, offset, dtype, CAST_LAST)
    cos_row = cos + i * sc_0 + j * sc_1 + k * sc_2
    sin_row = sin + i * ss_0 + j * ss_1 + k * ss_2
    first, second = turn_pairs(first, second, cos_row, sin_row, one, two, mask, dtype, ROUND)
    tl.store(target + one, first.to(dtype), mask=mask)
    tl.store(target + two, second.to(dtype), mask=mask)
    tail = normed(tail, scale, weight, rest, rest < d, offset, dtype, CAST_LAST)
    tl.store(target + rest, tail.to(dtype), mask=rest < d)


def rms_norm_rope_triton(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float = 0.0,
    cast_last: bool = False,
    interleaved: bool = False,
) -> Tensor:
    if x.dim() == 3:  # packed tokens are a batch of one
        batch = x.unsqueeze(0)
        return rms_norm_rope_triton(batch, weight, cos, sin, eps, offset, cast_last, interleaved).squeeze(0)
    d, r = x.shape[-1], cos.shape[-1]
    cos, sin = (spread(angles, x) for angles in (cos, sin))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # [b, h, s, d] or [b, s, h, d], as x
    rms_norm_rope_kernel[(x.shape[0] * x.shape[1] * x.shape[2],)](
        x, weight, cos, sin, out, x.shape[1], x.shape[2], d, r,
        *x.stride()[:3], *cos.stride()[:3], *sin.stride()[:3], eps, offset,
        HALF=triton.next_power_of_2(r // 2), REST=triton.next_power_of_2(max(d - r, 1)),
        ROUND=torch.promote_types(x.dtype, cos.dtype) == x.dtype,
        CAST_LAST=cast_last, INTERLEAVED=interleaved, num_warps=1,
    )  # fmt: skip
    return out
