"""Packed experts over rows sorted by expert: triton.py's two kernels over 16-bit words (weights/stacked.py).

A block of words is read once; each part of it, in the dtype of x, is multiplied with the columns of x that it meets.
Scales of rows are multiplied in at the end, scales of groups of 128 behind each part's product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.fused_linear.choice import FORMATS
from graft.ops.fused_linear.gemm import narrow
from graft.ops.fused_linear.triton import words_of
from graft.ops.fused_linear.widen import PARTS, RUN_4, columns_of
from graft.ops.moe_experts.pieces import find_block, store_hidden, store_pairs


@triton.jit
def add_part(
    total, a, w, scale, line, group, inside, groups, PART: tl.constexpr, KIND: tl.constexpr, FAST: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """total [rows, cols] plus the product of `a` [rows, words] and a part of the words [cols, words]."""
    q = narrow(w, PART, a.dtype, KIND, FAST)
    if UPCAST:
        a, q = a.to(tl.float32), q.to(tl.float32)
    if KIND == "int4":
        at = scale + line * groups + group
        factor = tl.load(at, mask=inside & (group < groups), other=0.0).to(tl.float32)
        return total + tl.dot(a, tl.trans(q), input_precision="ieee") * factor[None, :]
    else:
        return tl.dot(a, tl.trans(q), total, input_precision="ieee")


@triton.jit
def gate_up_packed_kernel(
    x, gate_up, scale, bias, weights, hidden, order, ends, stride_x, k, e, d, f, width, groups,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, WEIGH: tl.constexpr, UPCAST: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, KIND: tl.constexpr, PARTS: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """width: words of a row; DEPTH of them at once."""
    expert, first, end = find_block(ends, tl.program_id(0), e, E, ROWS)
    if expert >= e:
        return
    expert = expert.to(tl.int64)
    rows = first + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = rows < end
    there = cols < f
    pair = tl.load(order + rows, mask=inside, other=0)
    token = pair // k
    scales = scale + expert * 2 * f * groups
    gate_at = gate_up + expert * 2 * f * width + cols[:, None].to(tl.int64) * width
    up_at = gate_at + f.to(tl.int64) * width
    lane = tl.arange(0, DEPTH)
    gate = tl.zeros([ROWS, COLS], tl.float32)
    up = tl.zeros([ROWS, COLS], tl.float32)
    dtype = hidden.dtype.element_ty
    for start in range(0, width, DEPTH):
        word = start + lane
        mask = there[:, None] & (word < width)[None, :]
        g = tl.load(gate_at + word[None, :], mask=mask, other=0)  # [cols, words]
        u = tl.load(up_at + word[None, :], mask=mask, other=0)
        for part in tl.static_range(PARTS):
            column = columns_of(start, lane, part, KIND)
            at = token[:, None] * stride_x + column[None, :]
            a = tl.load(x + at, mask=inside[:, None] & (column < d)[None, :], other=0.0)
            if WEIGH:
                share = tl.load(weights + pair, mask=inside, other=0.0).to(tl.float32)
                a = (a.to(tl.float32) * share[:, None]).to(dtype)
            group = start // RUN_4 * 4 + part
            gate = add_part(gate, a, g, scales, cols, group, there, groups, part, KIND, FAST, UPCAST)
            up = add_part(up, a, u, scales, f + cols, group, there, groups, part, KIND, FAST, UPCAST)
    if KIND != "int4":
        gate *= tl.load(scales + cols, mask=there, other=0.0)[None, :]
        up *= tl.load(scales + f + cols, mask=there, other=0.0)[None, :]
    store_hidden(gate, up, hidden, bias + expert * 2 * f, cols, f + cols, rows, cols, inside, f, ACTIVATION, BIAS)


@triton.jit
def down_packed_kernel(
    hidden, down, scale, bias, weights, out, order, ends, e, d, f, width, groups,
    BIAS: tl.constexpr, WEIGH: tl.constexpr, UPCAST: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, DEPTH: tl.constexpr, KIND: tl.constexpr, PARTS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    expert, first, end = find_block(ends, tl.program_id(0), e, E, ROWS)
    if expert >= e:
        return
    expert = expert.to(tl.int64)
    rows = first + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = rows < end
    there = cols < d
    pair = tl.load(order + rows, mask=inside, other=0)  # which token and which of its experts
    scales = scale + expert * d * groups
    own = down + expert * d * width + cols[:, None].to(tl.int64) * width
    lane = tl.arange(0, DEPTH)
    result = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, width, DEPTH):
        word = start + lane
        w = tl.load(own + word[None, :], mask=there[:, None] & (word < width)[None, :], other=0)
        for part in tl.static_range(PARTS):
            column = columns_of(start, lane, part, KIND)
            at = rows[:, None].to(tl.int64) * f + column[None, :]
            a = tl.load(hidden + at, mask=inside[:, None] & (column < f)[None, :], other=0.0)
            group = start // RUN_4 * 4 + part
            result = add_part(result, a, w, scales, cols, group, there, groups, part, KIND, FAST, UPCAST)
    if KIND != "int4":
        result *= tl.load(scales + cols, mask=there, other=0.0)[None, :]
    dtype = hidden.dtype.element_ty
    store_pairs(
        result.to(dtype).to(tl.float32), out, bias + expert * d, weights, pair, cols, inside, d, dtype, BIAS, WEIGH
    )


def launch_packed(
    grids: list[tuple[int, int]], rows: tuple[Tensor, Tensor, Tensor], experts: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor], biases: list[Tensor], routed: tuple[Tensor, Tensor, Tensor],
    sizes: tuple[int, int, int, int], first: dict[str, object], second: dict[str, object],
) -> None:  # fmt: skip
    """rows: x, hidden, out. routed: weights, order, ends. sizes: k, e, d, f."""
    (x, hidden, out), (weights, order, ends), (k, e, d, f) = rows, routed, sizes
    kind, (up, down) = FORMATS[experts[0].dtype], (words_of(weight) for weight in experts)
    groups = [scale.shape[2] if scale.dim() == 3 else 1 for scale in scales]
    more = {"KIND": kind, "PARTS": PARTS[kind], "FAST": x.is_cuda and x.dtype is torch.bfloat16}
    gate_up_packed_kernel[grids[0]](
        x, up, scales[0], biases[0], weights, hidden, order, ends, x.stride(0), k, e, d, f, up.shape[2], groups[0],
        **first, **more,
    )  # fmt: skip
    down_packed_kernel[grids[1]](
        hidden, down, scales[1], biases[1], weights, out, order, ends, e, d, f, down.shape[2], groups[1],
        **second, **more,
    )  # fmt: skip
