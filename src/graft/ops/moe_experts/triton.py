"""Experts over rows sorted by expert: one program a block of an expert's rows and a block of columns.

How many blocks each expert has is known on the device alone. The grid has as many as there can be at most, which n·k
and e tell, and programs beyond the last block return: nothing waits for the device, so a CUDA graph can hold it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.moe_experts.grouped_packed import launch_packed
from graft.ops.moe_experts.pieces import find_block, store_hidden, store_pairs
from graft.ops.moe_experts.reference import group_ends


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
    store_hidden(
        gate,
        up,
        hidden,
        bias + expert.to(tl.int64) * 2 * f,
        gate_row,
        up_row,
        rows,
        cols,
        inside,
        f,
        ACTIVATION,
        BIAS,
    )


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
    store_pairs(
        result.to(hidden.dtype.element_ty).to(tl.float32), out, bias + expert.to(tl.int64) * d, weights, pair, cols,
        inside, d, hidden.dtype.element_ty, BIAS, WEIGH,
    )  # fmt: skip


def moe_experts_triton(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu",
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, interleaved: bool = False,
    weigh_input: bool = False, gate_up_scale: Tensor | None = None, down_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    (n, k), (e, d) = ids.shape, (down.shape[0], x.shape[1])
    f = gate_up.shape[1] // 2
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
    # one row for each of a token's experts, summed after: adding them up in place would not be deterministic
    out = torch.empty((pairs, d), dtype=torch.promote_types(x.dtype, weights.dtype), device=x.device)
    first = {"ACTIVATION": activation, "BIAS": gate_up_bias is not None} | sizes
    second = {"BIAS": down_bias is not None} | sizes
    grids = [(blocks, triton.cdiv(columns, 64)) for columns in (f, d)]
    if gate_up_scale is None or down_scale is None:
        gate_up_kernel[grids[0]](
            x, gate_up, biases[0], weights, hidden, order, ends, x.stride(0), *gate_up.stride(), k, e, d, f,
            INTERLEAVED=interleaved, **first,
        )  # fmt: skip
        down_kernel[grids[1]](
            hidden, down, biases[1], weights, out, order, ends, *down.stride(), e, d, f, **second
        )  # fmt: skip
    else:
        launch_packed(
            grids, (x, hidden, out), (gate_up, down), (gate_up_scale, down_scale), biases, (weights, order, ends),
            (k, e, d, f), first, second,
        )  # fmt: skip
    return out.view(n, k, d).sum(dim=1).to(x.dtype)
