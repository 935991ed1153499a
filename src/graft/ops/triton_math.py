"""Functions that Triton lacks or rounds otherwise than torch; kernels of `graft new-transform` import them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
PTX = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x in float32 as a number of `dtype`, in float32 again: what eager does behind every operation.

    A product rounded to 16 bits and then added is for LLVM a multiply-add of 16 bits, which rounds once: on an H200 a
    quarter of all rotated numbers were a step off. It does not look into the instruction that the number passes here.
    """
    narrow = x.to(dtype).to(tl.float32)
    if PTX:
        return tl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [narrow], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return narrow


@triton.jit
def load_wide(at, mask):
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def normed(h, scale, weight, offset, dtype: tl.constexpr, CAST_LAST: tl.constexpr):
    """h times `scale`, one by its root mean square, and times a norm's weight: in float32, rounded as eager does."""
    if CAST_LAST:
        y = h * scale * (weight + offset)
    else:
        y = weight * (h * scale).to(dtype).to(tl.float32)
    return y.to(dtype).to(tl.float32)


@triton.jit
def quotient(x, y):
    """x / y to two units in the last place, as `/` gives it, in half of its instructions; 0 for y beyond 2^126."""
    if PTX:
        return tl.inline_asm_elementwise(
            "div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return x / y


@triton.jit
def relu(x):
    return tl.where(x < 0.0, 0.0, x)  # NaN stays, where tl.maximum would give the other number on a GPU


@triton.jit
def tanh(x):
    # near 0 the quotient cancels, so the polynomial of Cephes takes over; both are good to 2 units in the last place
    z = x * x
    small = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
    small = x + x * z * (small - 3.33332819422e-1)
    magnitude = 1.0 - tl.div_rn(2.0, tl.exp(2.0 * tl.abs(x)) + 1.0)
    large = tl.where(x < 0, -magnitude, magnitude)
    return tl.where(tl.abs(x) < 0.625, small, large)


@triton.jit
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return tl.div_rn(x, 1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    inner = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1.0 + tanh(inner))


@triton.jit
def softplus(x):
    # log1p(e^x) as log(u) · e^x / (u - 1) with u = 1 + e^x, which takes back the rounding of u
    e = tl.exp(x)
    u = 1.0 + e
    tail = tl.where(u == 1.0, e, tl.log(u) * tl.div_rn(e, tl.where(u == 1.0, u, u - 1.0)))
    return tl.where(x > 20.0, x, tail)


@triton.jit
def minimum(a, b):
    return tl.where((a < b) | (a != a), a, b)  # a NaN on either side stays


@triton.jit
def maximum(a, b):
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def clamp(x, low, high):
    x = tl.where(x < low, low, x)
    return tl.where(x > high, high, x)


@triton.jit
def row_max(x, axis: tl.constexpr):
    odd = tl.max((x != x).to(tl.int32), axis)  # a NaN among them is the result, as in torch
    return tl.where(odd > 0, float("nan"), tl.max(x, axis))


@triton.jit
def row_min(x, axis: tl.constexpr):
    return -row_max(-x, axis)
