"""Rotary embedding, one program a head and token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rope_kernel(
    x,
    cos,
    sin,
    out,
    heads,
    length,
    d,
    r,
    sx_b,
    sx_h,
    sx_s,
    sc_b,
    sc_s,
    ss_b,
    ss_s,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    ROUND: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    s = pid % length
    h = (pid // length) % heads
    b = pid // (length * heads)
    source = x + b * sx_b + h * sx_h + s * sx_s
    target = out + pid * d
    half = r // 2
    cols = tl.arange(0, HALF)
    mask = cols < half
    low = tl.load(source + cols, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + half + cols, mask=mask, other=0.0).to(tl.float32)
    c_low = tl.load(cos + b * sc_b + s * sc_s + cols, mask=mask, other=0.0).to(tl.float32)
    c_high = tl.load(cos + b * sc_b + s * sc_s + half + cols, mask=mask, other=0.0).to(tl.float32)
    s_low = tl.load(sin + b * ss_b + s * ss_s + cols, mask=mask, other=0.0).to(tl.float32)
    s_high = tl.load(sin + b * ss_b + s * ss_s + half + cols, mask=mask, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    low_cos, high_sin, high_cos, low_sin = low * c_low, high * s_low, high * c_high, low * s_high
    if ROUND:  # eager rounds each product to the working dtype before the sum
        low_cos, high_sin = low_cos.to(dtype).to(tl.float32), high_sin.to(dtype).to(tl.float32)
        high_cos, low_sin = high_cos.to(dtype).to(tl.float32), low_sin.to(dtype).to(tl.float32)
    tl.store(target + cols, (low_cos - high_sin).to(dtype), mask=mask)
    tl.store(target + half + cols, (high_cos + low_sin).to(dtype), mask=mask)
    if REST > 0:
        rest = r + tl.arange(0, REST)
        tl.store(target + rest, tl.load(source + rest, mask=rest < d, other=0.0), mask=rest < d)


def rope_triton(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    b, h, s, d = x.shape
    r = cos.shape[-1]
    cos, sin = cos.expand(b, 1, s, r), sin.expand(b, 1, s, r)
    cos = cos if cos.stride(-1) == 1 else cos.contiguous()
    sin = sin if sin.stride(-1) == 1 else sin.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # [b, h, s, d]
    rope_kernel[(b * h * s,)](
        x, cos, sin, out, h, s, d, r, x.stride(0), x.stride(1), x.stride(2),
        cos.stride(0), cos.stride(2), sin.stride(0), sin.stride(2),
        HALF=triton.next_power_of_2(r // 2), REST=triton.next_power_of_2(d - r) if d > r else 0,
        ROUND=cos.dtype == x.dtype, num_warps=1,
    )  # fmt: skip
    return out
