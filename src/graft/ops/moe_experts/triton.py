"""Experts over rows sorted by expert: one program a block of an expert's rows and a block of columns.

How many blocks each expert has is known on the device alone. The grid has as many as there can be at most, which n·k
and e tell, and programs beyond the last block return: nothing waits for the device, so a CUDA graph can hold it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.moe_experts.reference import group_ends
from graft.ops.swiglu.triton import activate


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
def gate_up_kernel(
    x, gate_up, bias, weights, hidden, order, ends, stride_x, stride_e, stride_w, stride_d, k, e, d, f,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, INTERLEAVED: tl.constexpr, WEIGH: tl.constexpr,
    UPCAST: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert, first, end = find_block(ends, tl.program_id(0), e, E, ROWS)
    if expert >= e:
        return
    rows = first + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = rows < end
    pair = tl.load(order + rows, mask=inside, other=0)
    token = pair // k
    gate_row = 2 * cols if INTERLEAVED else cols
    up_row = gate_row + 1 if INTERLEAVED else cols + f
    weight = gate_up + expert.to(tl.int64) * stride_e
    gate_at = weight + gate_row[:, None].to(tl.int64) * stride_w
    up_at = weight + up_row[:, None].to(tl.int64) * stride_w
    gate = tl.zeros([ROWS, COLS], tl.float32)
    up = tl.zeros([ROWS, COLS], tl.float32)
    dtype = hidden.dtype.element_ty
    for start in range(0, d, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        at = token[:, None] * stride_x + depth[None, :]
        a = tl.load(x + at, mask=inside[:, None] & (depth[None, :] < d), other=0.0)  # [rows, depth]
        if WEIGH:
            share = tl.load(weights + pair, mask=inside, other=0.0).to(tl.float32)
            a = (a.to(tl.float32) * share[:, None]).to(dtype)
        w_mask = (cols[:, None] < f) & (depth[None, :] < d)
        along = depth[None, :].to(tl.int64) * stride_d
        g = tl.load(gate_at + along, mask=w_mask, other=0.0)  # [cols, depth]
        u = tl.load(up_at + along, mask=w_mask, other=0.0)
        if UPCAST:
            a, g, u = a.to(tl.float32), g.to(tl.float32), u.to(tl.float32)
        gate = tl.dot(a, tl.trans(g), gate, input_precision="ieee")
        up = tl.dot(a, tl.trans(u), up, input_precision="ieee")
    # the projections and the activation are rounded to the working dtype, as in eager
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if BIAS:
        of_expert = bias + expert.to(tl.int64) * 2 * f
        gate += tl.load(of_expert + gate_row, mask=cols < f, other=0.0).to(tl.float32)[None, :]
        up += tl.load(of_expert + up_row, mask=cols < f, other=0.0).to(tl.float32)[None, :]
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if ACTIVATION == "clamped_swiglu":
        result = clamped_swiglu(gate, up, dtype)
    else:
        result = activate(gate, ACTIVATION).to(dtype).to(tl.float32) * up
    target = hidden + rows[:, None].to(tl.int64) * f + cols[None, :]
    tl.store(target, result.to(dtype), mask=inside[:, None] & (cols[None, :] < f))


@triton.jit
def down_kernel(
    hidden, down, bias, weights, out, order, ends, stride_e, stride_w, stride_f, e, d, f,
    BIAS: tl.constexpr, WEIGH: tl.constexpr,
    UPCAST: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert, first, end = find_block(ends, tl.program_id(0), e, E, ROWS)
    if expert >= e:
        return
    rows = first + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = rows < end
    pair = tl.load(order + rows, mask=inside, other=0)  # which token and which of its experts
    weight = down + expert.to(tl.int64) * stride_e + cols[:, None].to(tl.int64) * stride_w
    result = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, f, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        at = rows[:, None].to(tl.int64) * f + depth[None, :]
        a = tl.load(hidden + at, mask=inside[:, None] & (depth[None, :] < f), other=0.0)  # [rows, depth]
        w_mask = (cols[:, None] < d) & (depth[None, :] < f)
        w = tl.load(weight + depth[None, :].to(tl.int64) * stride_f, mask=w_mask, other=0.0)
        if UPCAST:
            a, w = a.to(tl.float32), w.to(tl.float32)
        result = tl.dot(a, tl.trans(w), result, input_precision="ieee")
    result = result.to(hidden.dtype.element_ty).to(tl.float32)
    if BIAS:
        result += tl.load(bias + expert.to(tl.int64) * d + cols, mask=cols < d, other=0.0).to(tl.float32)[None, :]
        result = result.to(hidden.dtype.element_ty).to(tl.float32)
    if not WEIGH:
        result = result * tl.load(weights + pair, mask=inside, other=0.0).to(tl.float32)[:, None]
    target = out + pair[:, None] * d + cols[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=inside[:, None] & (cols[None, :] < d))


def moe_experts_triton(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu",
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, interleaved: bool = False,
    weigh_input: bool = False,
) -> Tensor:  # fmt: skip
    (n, k), (e, d, f) = ids.shape, down.shape
    pairs = n * k
    x = x if x.stride(-1) == 1 else x.contiguous()
    weights = weights.contiguous()
    by_expert, order = torch.sort(ids.reshape(-1))
    ends = group_ends(by_expert, e)
    rows = 16 if pairs <= 32 * e else 64
    blocks = min(e, pairs) + pairs // rows  # at most: each expert with rows has one block that is not full
    sizes = {
        "E": triton.next_power_of_2(e), "ROWS": rows, "COLS": 64, "DEPTH": 64, "num_warps": 4, "WEIGH": weigh_input,
        "UPCAST": x.device.type == "cpu",  # Triton's interpreter multiplies 16-bit floats wrongly
    }  # fmt: skip
    hidden = torch.empty((pairs, f), dtype=x.dtype, device=x.device)
    biases = [x if bias is None else bias.contiguous() for bias in (gate_up_bias, down_bias)]  # x: nobody reads it
    gate_up_kernel[(blocks, triton.cdiv(f, 64))](
        x, gate_up, biases[0], weights, hidden, order, ends, x.stride(0), *gate_up.stride(), k, e, d, f,
        ACTIVATION=activation, BIAS=gate_up_bias is not None, INTERLEAVED=interleaved, **sizes,
    )  # fmt: skip
    # one row for each of a token's experts, summed after: adding them up in place would not be deterministic
    out = torch.empty((pairs, d), dtype=torch.promote_types(x.dtype, weights.dtype), device=x.device)
    down_kernel[(blocks, triton.cdiv(d, 64))](
        hidden, down, biases[1], weights, out, order, ends, *down.stride(), e, d, f,
        BIAS=down_bias is not None, **sizes,
    )  # fmt: skip
    return out.view(n, k, d).sum(dim=1).to(x.dtype)
