"""A gated MLP on float8 tensor cores: what the activation gives is rounded where it is made.

    x ──round_rows──▶ q, s ──_scaled_mm──▶ y ──activate_and_round──▶ q', s' ──_scaled_mm──▶ z ──finish──▶ + residual

Between two calls of graft::fused_linear it would be written in 16 bits, and read again to be rounded: 169 and 142 us
for 8,192 tokens of 8B, where this takes 166.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.fused_linear.round_rows import round_row, round_rows, run_columns, warps_for
from graft.ops.fused_linear.scaled import finish_gated, multiply_rounded, scaled_matmul, takes_scales
from graft.ops.fused_linear.triton import LinearCall
from graft.ops.launch import dense_rows, pdl_supported

MOST_WARPS = 8  # of 4, 8 and 16: 233, 166 and 172 us for 8,192 rows of 14,336


@triton.jit
def activate_and_round_kernel(
    y, x_scale, w_scale, bias, like, out, scales, n, width, stride_y,
    SCALED: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, UPCAST: tl.constexpr, HALF: tl.constexpr,
    EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of y [tokens, 2 n], and of `out` [tokens, width] in float8 and in the order of 8-bit weights."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dtype = like.dtype.element_ty
    cols_0, cols_1 = run_columns(0, HALF, True), run_columns(1, HALF, True)
    part_0 = finish_gated(
        y, x_scale, w_scale, bias, row, cols_0, n, stride_y, SCALED, BIAS, ACTIVATION, UPCAST, dtype
    )
    part_1 = finish_gated(
        y, x_scale, w_scale, bias, row, cols_1, n, stride_y, SCALED, BIAS, ACTIVATION, UPCAST, dtype
    )
    round_row(part_0, part_1, out, scales, row, width, HALF, False, True, EXACT)


def activate_and_round(call: LinearCall, y: Tensor, x_scales: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """y [tokens, 2 n] of the gate-up layer `call`, scaled already where no scales are given: as `round_rows` would
    give the activation, [tokens, width], and scales [tokens]."""
    assert call.scale is not None
    tokens, device = y.shape[0], y.device
    out = torch.empty((tokens, width), dtype=call.weight.dtype, device=device)
    scales = torch.empty(tokens, dtype=torch.float32, device=device)
    half, pdl, absent = triton.next_power_of_2(width) // 2, pdl_supported(device), call.x
    activate_and_round_kernel[(tokens,)](
        y, absent if x_scales is None else x_scales, call.scale, absent if call.bias is None else call.bias, call.x,
        out, scales, call.rows, width, y.stride(0), SCALED=x_scales is not None, BIAS=call.bias is not None,
        ACTIVATION=call.activation, UPCAST=call.upcast, HALF=half, EXACT=not y.is_cuda, PDL=pdl,
        num_warps=min(warps_for(half), MOST_WARPS), launch_pdl=pdl,
    )  # fmt: skip
    return out, scales


def gated_mlp_scaled(
    x: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor, activation: str,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, norm: Tensor | None = None, eps: float = 0.0,
    offset: float = 0.0, cast_last: bool = False, upcast: bool = False, residual: Tensor | None = None,
    normed: bool = False, fp8_from: int = 0,
) -> Tensor:  # fmt: skip
    rows = dense_rows(x)
    first = LinearCall(
        rows, gate_up, gate_up_bias, gate_up_scale, norm, eps, offset, cast_last, activation, upcast, None, normed,
        fp8_from,
    )  # fmt: skip
    q, scales = round_rows(first, gate_up.shape[1])
    scaled = takes_scales(first)
    y = scaled_matmul(first, q, scales if scaled else None)
    q, scales = activate_and_round(first, y, None if scaled else scales, down.shape[1])
    m = down.shape[0]
    added = None if residual is None else residual.reshape(-1, m).contiguous()
    second = LinearCall(rows, down, down_bias, down_scale, residual=added, fp8_from=fp8_from)
    return multiply_rounded(second, q, scales).view(*x.shape[:-1], m)
