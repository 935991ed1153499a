"""Packed experts of a few tokens: gemv.py's kernels over 16-bit words of int8, int4 or float8 (weights/stacked.py).

A word holds two or four weights of different runs; each part of it meets its own part of x (fused_linear/widen.py).
An expert's scales are multiplied in behind the sums: of a row, or of a group of 128, which eight words never leave.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graft.ops.fused_linear.choice import FORMATS
from graft.ops.fused_linear.matvec import by_eights
from graft.ops.fused_linear.triton import words_of
from graft.ops.fused_linear.widen import PARTS, RUN_4, TOO_MUCH, columns_of, widen
from graft.ops.launch import pdl_supported
from graft.ops.moe_experts.pieces import UNROLL, Sizes, finish_hidden, finish_token
from graft.ops.triton_math import rounded


@triton.jit
def group_of(first, lane, PART: tl.constexpr):
    """Of 4-bit weights the group that part PART of the words first + lane belongs to."""
    return (first + lane) // RUN_4 * 4 + PART


@triton.jit
def add_rows(
    total, q, h, eights, scale, row, group, inside, groups, KIND: tl.constexpr, TOO_MUCH: tl.constexpr
):  # fmt: skip
    """total [rows, words / 8] plus a part of the words, `q` [rows, words], times what it meets of x, `h` [words]."""
    product = by_eights(q * h[None, :])
    if KIND == "int4":
        if TOO_MUCH > 0:
            product -= TOO_MUCH * eights[None, :]
        at = scale + row[:, None] * groups + group[None, :]
        product *= tl.load(at, mask=inside & (group < groups)[None, :], other=0.0).to(tl.float32)
    return total + product


@triton.jit
def gate_up_packed_gemv(
    x, gate_up, scale, bias, weights, ids, hidden, stride_x, k, d, f, width, groups,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, WEIGH: tl.constexpr, KIND: tl.constexpr, PARTS: tl.constexpr,
    TOO_MUCH: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr,
    FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """width: words of a row; DEPTH of them at once."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < f)[:, None]
    dtype = hidden.dtype.element_ty
    lane = tl.arange(0, DEPTH)
    if PDL:
        tl.extra.cuda.gdc_wait()
    expert = tl.load(ids + pair).to(tl.int64)
    share = tl.load(weights + pair).to(tl.float32)
    gate_at = gate_up + expert * 2 * f * width + row[:, None].to(tl.int64) * width
    scales = scale + expert * 2 * f * groups
    gate = tl.zeros([ROWS, DEPTH // 8], tl.float32)
    up = tl.zeros([ROWS, DEPTH // 8], tl.float32)
    total = tl.zeros([DEPTH // 8], tl.float32)
    for step in tl.range(0, STEPS, loop_unroll_factor=UNROLL):
        word = step * DEPTH + lane
        mask = inside & (word < width)[None, :]
        g = tl.load(gate_at + word[None, :], mask=mask, other=0, eviction_policy="evict_first")
        u = tl.load(
            gate_at + f.to(tl.int64) * width + word[None, :], mask=mask, other=0, eviction_policy="evict_first"
        )
        gates, ups = widen(g, KIND, FAST), widen(u, KIND, FAST)
        for part in tl.static_range(PARTS):
            column = columns_of(step * DEPTH, lane, part, KIND)
            h = tl.load(x + (pair // k) * stride_x + column, mask=column < d, other=0.0).to(tl.float32)
            if WEIGH:
                h = rounded(h * share, dtype)
            eights = by_eights(h)
            group = group_of(step * DEPTH, 8 * tl.arange(0, DEPTH // 8), part)
            gate = add_rows(gate, gates[part], h, eights, scales, row, group, inside, groups, KIND, TOO_MUCH)
            up = add_rows(up, ups[part], h, eights, scales, f + row, group, inside, groups, KIND, TOO_MUCH)
            total += eights
    y, z = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    if KIND != "int4":
        if TOO_MUCH > 0:
            y -= TOO_MUCH * tl.sum(total, axis=0)
            z -= TOO_MUCH * tl.sum(total, axis=0)
        y *= tl.load(scales + row, mask=row < f, other=0.0)
        z *= tl.load(scales + f + row, mask=row < f, other=0.0)
    finish_hidden(rounded(y, dtype), rounded(z, dtype), hidden, bias, expert, pair, row, f, ACTIVATION, BIAS, False)


@triton.jit
def down_packed_gemv(
    hidden, down, scale, bias, weights, ids, out, k, d, f, width, groups,
    BIAS: tl.constexpr, WEIGH: tl.constexpr, NARROW: tl.constexpr, KIND: tl.constexpr, PARTS: tl.constexpr,
    TOO_MUCH: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr,
    UNROLL: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """NARROW: weights have the working dtype, so products with them are rounded to it."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.arange(0, K)
    pair = token * k + slot
    dtype = hidden.dtype.element_ty
    lane = tl.arange(0, DEPTH)
    if PDL:
        tl.extra.cuda.gdc_wait()
    expert = tl.load(ids + pair, mask=slot < k, other=0).to(tl.int64)
    line = expert[:, None] * d + row[None, :]  # [k, rows]
    inside = (slot < k)[:, None] & (row < d)[None, :]
    total = tl.zeros([K, ROWS, DEPTH // 8], tl.float32)
    for step in tl.range(0, STEPS, loop_unroll_factor=UNROLL):
        word = step * DEPTH + lane
        mask = inside[:, :, None] & (word < width)[None, None, :]
        at = down + line[:, :, None] * width + word[None, None, :]
        parts = widen(tl.load(at, mask=mask, other=0, eviction_policy="evict_first"), KIND, FAST)
        for part in tl.static_range(PARTS):
            column = columns_of(step * DEPTH, lane, part, KIND)
            known = (slot < k)[:, None] & (column < f)[None, :]
            h = tl.load(hidden + pair[:, None].to(tl.int64) * f + column[None, :], mask=known, other=0.0)
            h = h.to(tl.float32)  # [k, words]
            product = tl.sum(tl.reshape(parts[part] * h[:, None, :], [K, ROWS, DEPTH // 8, 8]), axis=3)
            if TOO_MUCH > 0:
                product -= TOO_MUCH * by_eights(h)[:, None, :]
            if KIND == "int4":
                group = group_of(step * DEPTH, 8 * tl.arange(0, DEPTH // 8), part)
                there = inside[:, :, None] & (group < groups)[None, None, :]
                at = scale + line[:, :, None] * groups + group[None, None, :]
                product *= tl.load(at, mask=there, other=0.0).to(tl.float32)
            total += product
    result = tl.sum(total, axis=2)
    if KIND != "int4":
        result *= tl.load(scale + line, mask=inside, other=0.0)
    result = rounded(result, dtype)
    finish_token(result, out, bias, weights, expert, pair, inside, token, row, k, d, BIAS, WEIGH, NARROW, dtype)


def sizes_for(words: int, kind: str, at_once: int) -> Sizes:
    """at_once: rows of matrices that a program reads for one of its own. A thread widens up to 64 numbers at once."""
    deep = min(1024, 2048 // at_once, max(8, triton.next_power_of_2(words)))
    return Sizes(max(1, min(4, 8192 // (deep * at_once * PARTS[kind]))), deep, 4)


def launch_packed_gemv(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activation: str,
    biases: list[Tensor | None], weigh_input: bool, scales: tuple[Tensor, Tensor], hidden: Tensor, out: Tensor,
    up_sizes: Sizes | None = None, down_sizes: Sizes | None = None,
) -> Tensor:  # fmt: skip
    """x, weights and ids lie row by row; hidden [n·k, f] and out [n, d] are written."""
    (n, k), d, f = ids.shape, x.shape[1], hidden.shape[1]
    kind, pdl = FORMATS[gate_up.dtype], pdl_supported(x.device)
    slots = triton.next_power_of_2(k)
    words = [words_of(weight) for weight in (gate_up, down)]
    first = up_sizes or sizes_for(words[0].shape[-1], kind, 2)
    second = down_sizes or sizes_for(words[1].shape[-1], kind, slots)
    there = [x if bias is None else bias.contiguous() for bias in biases]  # x: nobody reads it
    gate_up_packed_gemv[(triton.cdiv(f, first.rows), n * k)](
        x, words[0], scales[0], there[0], weights, ids, hidden, x.stride(0), k, d, f, words[0].shape[-1],
        groups_of(scales[0]), ACTIVATION=activation, BIAS=biases[0] is not None, WEIGH=weigh_input, PDL=pdl,
        **constants(words[0], first, kind, x),
    )  # fmt: skip
    down_packed_gemv[(triton.cdiv(d, second.rows), n)](
        hidden, words[1], scales[1], there[1], weights, ids, out, k, d, f, words[1].shape[-1], groups_of(scales[1]),
        BIAS=biases[1] is not None, WEIGH=weigh_input, NARROW=weights.dtype == x.dtype, K=slots, PDL=pdl,
        **constants(words[1], second, kind, x),
    )  # fmt: skip
    return out


def groups_of(scale: Tensor) -> int:
    return scale.shape[2] if scale.dim() == 3 else 1


def constants(words: Tensor, sizes: Sizes, kind: str, x: Tensor) -> dict[str, object]:
    steps, fast = triton.cdiv(words.shape[-1], sizes.depth), x.is_cuda and x.element_size() == 2
    return {
        "ROWS": sizes.rows, "DEPTH": sizes.depth, "STEPS": steps, "UNROLL": min(UNROLL, steps), "KIND": kind,
        "PARTS": PARTS[kind], "FAST": fast, "TOO_MUCH": TOO_MUCH.get(kind, 0.0) if fast else 0.0,
        "num_warps": sizes.warps, "launch_pdl": pdl_supported(x.device),
    }  # fmt: skip
