"""activation(gate) * up, elementwise over rows that may be halves of one wider row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.triton_math import quotient


@triton.jit
def tanh(x):
    # 1 - 2 / (e^2x + 1): right at both ends, where e^2x is 0 or infinite
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def activate(g, ACTIVATION: tl.constexpr):
    """g in float32."""
    if ACTIVATION == "silu":
        a = quotient(g, 1.0 + tl.exp(-g))
    elif ACTIVATION == "gelu_tanh":
        a = 0.5 * g * (1.0 + tanh(0.7978845608028654 * (g + 0.044715 * g * g * g)))
    elif ACTIVATION == "relu":
        a = tl.where(g < 0.0, 0.0, g)  # NaN stays, which `maximum` drops
    elif ACTIVATION == "relu_squared":
        a = tl.where(g < 0.0, 0.0, g * g)
    else:
        a = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
    return a


@triton.jit
def swiglu_kernel(
    gate, up, out, stride_g, stride_u, d, ACTIVATION: tl.constexpr, UPCAST: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < d
    g = tl.load(gate + row * stride_g + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride_u + cols, mask=mask, other=0.0).to(tl.float32)
    a = activate(g, ACTIVATION)
    if not UPCAST:  # the activation is rounded to the working dtype before the product, as in eager
        a = a.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * d + cols, (a * u).to(out.dtype.element_ty), mask=mask)


def swiglu_triton(gate: Tensor, up: Tensor, activation: str = "silu", upcast: bool = False) -> Tensor:
    d = gate.shape[-1]
    gates, ups = as_rows(gate), as_rows(up)  # [n, d]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    block = min(1024, triton.next_power_of_2(d))
    grid = (gates.shape[0], triton.cdiv(d, block))
    swiglu_kernel[grid](
        gates, ups, out, gates.stride(0), ups.stride(0), d, ACTIVATION=activation, UPCAST=upcast, BLOCK=block
    )
    return out


def as_rows(x: Tensor) -> Tensor:
    """[..., d] as [n, d]; a slice of a wider row stays a view."""
    return x.reshape(-1, x.shape[-1])
