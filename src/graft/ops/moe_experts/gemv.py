"""Experts of a few tokens: each chosen expert is read where it lies, once for each token that was sent to it.

Two kernels, and nothing is sorted, gathered or asked of the device. gate_up_gemv: one program for some rows of one
chosen expert and one token, with the activation. down_gemv: one program for some columns of one token's result; it
reads those rows of all its k experts at once and adds them up by weight, in the order of `ids`.

Weights may lie as [e, out, in] or transposed (gpt-oss): a tile is long where memory is. Sizes are Sizes; what is
fastest is for benchmarks/experts.py to say.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.fused_linear.matvec import by_eights
from graft.ops.fused_linear.widen import as_float
from graft.ops.launch import pdl_supported
from graft.ops.moe_experts.gemv_packed import launch_packed_gemv
from graft.ops.moe_experts.pieces import UNROLL, Sizes, finish_hidden, finish_token
from graft.ops.triton_math import rounded


@triton.jit
def add_products(total, w, h, EIGHTHS: tl.constexpr):
    """total += w * h, the 8 numbers that a thread has of a row at once."""
    if EIGHTHS:
        return total + by_eights(w * h)
    else:
        return total + w * h


@triton.jit
def gate_up_gemv(
    x, gate_up, bias, weights, ids, hidden, stride_x, stride_e, stride_w, stride_d, k, d, f,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, INTERLEAVED: tl.constexpr, WEIGH: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr, EIGHTHS: tl.constexpr,
    FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # rows of gate and up that take turns are one tile, as they lie; split once they are summed
    BOTH: tl.constexpr = 2 * ROWS if INTERLEAVED else ROWS
    line = tl.program_id(0) * BOTH + tl.arange(0, BOTH)
    inside = (line < (2 * f if INTERLEAVED else f))[:, None]
    dtype = hidden.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_wait()
    expert = tl.load(ids + pair).to(tl.int64)
    share = tl.load(weights + pair).to(tl.float32)
    gate_at = gate_up + expert * stride_e + line[:, None].to(tl.int64) * stride_w
    up_at = gate_at + f.to(tl.int64) * stride_w
    WIDTH: tl.constexpr = DEPTH // 8 if EIGHTHS else DEPTH
    gate = tl.zeros([BOTH, WIDTH], tl.float32)
    up = tl.zeros([BOTH, WIDTH], tl.float32)
    for step in tl.range(0, STEPS, loop_unroll_factor=UNROLL):
        depth = step * DEPTH + tl.arange(0, DEPTH)
        mask = inside & (depth < d)[None, :]
        along = depth[None, :].to(tl.int64) * stride_d
        g = tl.load(gate_at + along, mask=mask, other=0.0, eviction_policy="evict_first")
        h = tl.load(x + (pair // k) * stride_x + depth, mask=depth < d, other=0.0).to(tl.float32)
        if WEIGH:
            h = rounded(h * share, dtype)
        gate = add_products(gate, as_float(g, FAST), h[None, :], EIGHTHS)
        if not INTERLEAVED:
            u = tl.load(up_at + along, mask=mask, other=0.0, eviction_policy="evict_first")
            up = add_products(up, as_float(u, FAST), h[None, :], EIGHTHS)
    # the projections and the activation are rounded to the working dtype, as in eager
    if INTERLEAVED:
        y, z = tl.split(tl.reshape(rounded(tl.sum(gate, axis=1), dtype), [ROWS, 2]))
    else:
        y, z = rounded(tl.sum(gate, axis=1), dtype), rounded(tl.sum(up, axis=1), dtype)  # [rows]
    finish_hidden(y, z, hidden, bias, expert, pair, row, f, ACTIVATION, BIAS, INTERLEAVED)


@triton.jit
def down_gemv(
    hidden, down, bias, weights, ids, out, stride_e, stride_w, stride_f, k, d, f,
    BIAS: tl.constexpr, WEIGH: tl.constexpr, NARROW: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr, EIGHTHS: tl.constexpr, FAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """NARROW: weights have the working dtype, so products with them are rounded to it."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.arange(0, K)
    pair = token * k + slot
    dtype = hidden.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_wait()
    expert = tl.load(ids + pair, mask=slot < k, other=0).to(tl.int64)
    at = expert[:, None] * stride_e + row[None, :].to(tl.int64) * stride_w  # [k, rows]
    inside = (slot < k)[:, None] & (row < d)[None, :]
    WIDTH: tl.constexpr = DEPTH // 8 if EIGHTHS else DEPTH
    total = tl.zeros([K * ROWS, WIDTH], tl.float32)
    for step in tl.range(0, STEPS, loop_unroll_factor=UNROLL):
        depth = step * DEPTH + tl.arange(0, DEPTH)
        mask = inside[:, :, None] & (depth < f)[None, None, :]
        along = depth[None, None, :].to(tl.int64) * stride_f
        w = tl.load(down + at[:, :, None] + along, mask=mask, other=0.0, eviction_policy="evict_first")
        from_pair = pair[:, None].to(tl.int64) * f + depth[None, :]
        h = tl.load(hidden + from_pair, mask=(slot < k)[:, None] & (depth < f)[None, :], other=0.0).to(tl.float32)
        products = as_float(w, FAST) * h[:, None, :]  # [k, rows, depth]
        products = tl.reshape(products, [K * ROWS, DEPTH])
        total += by_eights(products) if EIGHTHS else products
    result = rounded(tl.reshape(tl.sum(total, axis=1), [K, ROWS]), dtype)
    finish_token(result, out, bias, weights, expert, pair, inside, token, row, k, d, BIAS, WEIGH, NARROW, dtype)


def sizes_for(weight: Tensor, depth: int, at_once: int = 1) -> Sizes:
    """at_once: matrices that a program reads. A thread has up to 64 numbers of a tile in flight, 8 to a load."""
    if weight.stride(-1) == 1:
        deep = min(1024, 2048 // at_once, max(8, triton.next_power_of_2(depth)))
        return Sizes(max(1, min(4, 8192 // (deep * at_once))), deep, 4)
    return Sizes(32, max(8, 64 // at_once), 4)


def moe_experts_gemv(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu",
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, interleaved: bool = False,
    weigh_input: bool = False, gate_up_scale: Tensor | None = None, down_scale: Tensor | None = None,
    up_sizes: Sizes | None = None, down_sizes: Sizes | None = None,
) -> Tensor:  # fmt: skip
    (n, k), d, f = ids.shape, x.shape[1], gate_up.shape[1] // 2
    x = x if x.stride(-1) == 1 else x.contiguous()
    ids, weights = ids.contiguous(), weights.contiguous()
    hidden = torch.empty((n * k, f), dtype=x.dtype, device=x.device)
    out = torch.empty((n, d), dtype=x.dtype, device=x.device)
    if gate_up_scale is not None and down_scale is not None:
        return launch_packed_gemv(
            x, weights, ids, gate_up, down, activation, [gate_up_bias, down_bias], weigh_input,
            (gate_up_scale, down_scale), hidden, out, up_sizes, down_sizes,
        )  # fmt: skip
    first = up_sizes or sizes_for(gate_up, d)
    slots = triton.next_power_of_2(k)
    second = down_sizes or sizes_for(down, f, slots)
    pdl = pdl_supported(x.device)
    biases = [x if bias is None else bias.contiguous() for bias in (gate_up_bias, down_bias)]  # x: nobody reads it
    gate_up_gemv[(triton.cdiv(f, first.rows), n * k)](
        x, gate_up, biases[0], weights, ids, hidden, x.stride(0), *gate_up.stride(), k, d, f,
        ACTIVATION=activation, BIAS=gate_up_bias is not None, INTERLEAVED=interleaved, WEIGH=weigh_input, PDL=pdl,
        **constants(gate_up, first, d),
    )  # fmt: skip
    down_gemv[(triton.cdiv(d, second.rows), n)](
        hidden, down, biases[1], weights, ids, out, *down.stride(), k, d, f,
        BIAS=down_bias is not None, WEIGH=weigh_input, NARROW=weights.dtype == x.dtype, K=slots, PDL=pdl,
        **constants(down, second, f),
    )  # fmt: skip
    return out


def constants(weight: Tensor, sizes: Sizes, depth: int) -> dict[str, object]:
    """FAST: two bfloat16 numbers of a row are widened at once, where PTX runs."""
    along, steps = weight.stride(-1) == 1, triton.cdiv(depth, sizes.depth)
    return {
        "ROWS": sizes.rows, "DEPTH": sizes.depth, "STEPS": steps, "UNROLL": min(UNROLL, steps),
        "EIGHTHS": along, "FAST": along and weight.device.type == "cuda" and torch.version.hip is None,
        "num_warps": sizes.warps, "launch_pdl": pdl_supported(weight.device),
    }  # fmt: skip
