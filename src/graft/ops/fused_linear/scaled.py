"""float8 weights times float8 activations on tensor cores: rows of x rounded, torch's GEMM, the rest after it.

    x ──round_rows──▶ q, s ──_scaled_mm──▶ y [tokens, n] ──finish──▶ scales, bias, gated activation, residual

With few tokens torch's GEMM is quicker by far without scales, which the last kernel then brings in (8B down, 64
tokens: 18 against 37 us); with many it is quicker with them. H200, torch 2.11; RESULTS.md has the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.fused_linear.round_rows import round_rows
from graft.ops.launch import pdl_supported
from graft.ops.swiglu.triton import activate

if TYPE_CHECKING:
    from graft.ops.fused_linear.triton import LinearCall

FEW_TOKENS = 512  # up to here the GEMM goes without scales
BLOCK = 1024


@triton.jit
def finish_kernel(
    y, x_scale, w_scale, bias, residual, alpha, out, n, stride_y, stride_r,
    SCALED: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, UPCAST: tl.constexpr,
    RESIDUAL: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of `out` [tokens, n], COLUMNS at a time; with a gate y has 2 n columns."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = cols < n
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dtype = out.dtype.element_ty
    if GATED:
        found = finish_gated(
            y, x_scale, w_scale, bias, row, cols, n, stride_y, SCALED, BIAS, ACTIVATION, UPCAST, dtype
        )
    else:
        found = finish_half(y, x_scale, w_scale, bias, row, cols, 0, mask, stride_y, SCALED, BIAS, dtype)
        if ACTIVATION != "none":
            found = activate(found, ACTIVATION).to(dtype).to(tl.float32)
    if RESIDUAL:
        found = found * alpha + tl.load(residual + row * stride_r + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * n + cols, found.to(dtype), mask=mask)


@triton.jit
def finish_gated(
    y, x_scale, w_scale, bias, row, cols, n, stride_y, SCALED: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, UPCAST: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Columns `cols` of activate(gate) * up, as eager rounds them, in float32."""
    mask = cols < n
    gate = finish_half(y, x_scale, w_scale, bias, row, cols, 0, mask, stride_y, SCALED, BIAS, dtype)
    up = finish_half(y, x_scale, w_scale, bias, row, cols, n, mask, stride_y, SCALED, BIAS, dtype)
    gate = activate(gate, ACTIVATION)
    if not UPCAST:  # the activation is rounded to the working dtype before the product, as in eager
        gate = gate.to(dtype).to(tl.float32)
    return (gate * up).to(dtype).to(tl.float32)


@triton.jit
def finish_half(
    y, x_scale, w_scale, bias, row, cols, first, mask, stride_y, SCALED: tl.constexpr, BIAS: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Columns first + cols of a row, as the linear layer gives them, rounded to its dtype; in float32."""
    found = tl.load(y + row * stride_y + first + cols, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        found = found * tl.load(x_scale + row) * tl.load(w_scale + first + cols, mask=mask, other=0.0)
    if BIAS:
        found += tl.load(bias + first + cols, mask=mask, other=0.0).to(tl.float32)
    return found.to(dtype).to(tl.float32)


def launch_scaled(call: LinearCall) -> Tensor:
    from graft.ops.fused_linear.triton import uncentred

    call = uncentred(call)
    return multiply_rounded(call, *round_rows(call, call.weight.shape[1]))


def multiply_rounded(call: LinearCall, q: Tensor, scales: Tensor) -> Tensor:
    """Rows that are rounded already, by the weight, and what comes after it; of call.x its dtype and tokens count."""
    scaled = takes_scales(call)
    y = scaled_matmul(call, q, scales if scaled else None)
    if scaled and call.bias is None and call.activation == "none" and call.residual is None:
        return y
    return finish(call, y, None if scaled else scales)


def takes_scales(call: LinearCall) -> bool:
    """Whether the GEMM gets them; with scales torch's gives bfloat16 alone."""
    return call.x.shape[0] > FEW_TOKENS and call.x.dtype is torch.bfloat16


def scaled_matmul(call: LinearCall, q: Tensor, scales: Tensor | None) -> Tensor:
    """[tokens, rows of the weight], times the scales where they are given. Unscaled it may be beyond float16."""
    assert call.scale is not None
    dtype = torch.bfloat16 if call.x.dtype is torch.bfloat16 else torch.float32
    if not call.x.is_cuda:  # where Triton's interpreter runs the kernels around it
        y = q.float() @ call.weight.float().t()
        return (y if scales is None else y * scales[:, None] * call.scale).to(dtype)
    one = unit(q.device)
    by_row = (one, one) if scales is None else (scales[:, None], call.scale[None, :])
    return torch._scaled_mm(q, call.weight.t(), *by_row, out_dtype=dtype, use_fast_accum=True)


UNITS: dict[torch.device, Tensor] = {}


def unit(device: torch.device) -> Tensor:
    """A scale of 1, made once and outside of any CUDA graph's pool."""
    if device not in UNITS:
        UNITS[device] = torch.ones((), device=device)
    return UNITS[device]


def finish(call: LinearCall, y: Tensor, scales: Tensor | None) -> Tensor:
    assert call.scale is not None
    tokens, n = call.x.shape[0], call.rows
    out = torch.empty((tokens, n), dtype=call.x.dtype, device=call.x.device)
    pdl = pdl_supported(call.x.device)
    absent = call.x
    finish_kernel[(tokens, triton.cdiv(n, BLOCK))](
        y, absent if scales is None else scales, call.scale, absent if call.bias is None else call.bias,
        absent if call.residual is None else call.residual, call.alpha, out, n, y.stride(0),
        0 if call.residual is None else call.residual.stride(0),
        SCALED=scales is not None, BIAS=call.bias is not None, ACTIVATION=call.activation, GATED=call.gated,
        UPCAST=call.upcast, RESIDUAL=call.residual is not None, COLUMNS=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
