"""fused_linear of int8 and int4 weights for many tokens: integer tensor cores, with 15 bits of x.

A row of x is the sum of two rows of int8, the second 254 times finer than the first (round_rows.py): 15 bits where
bfloat16 has 8. Both are multiplied with the weights as they lie in memory, at twice the rate of bfloat16, and no
weight is widened to 16 bits. The two rows of a token are neighbours, and so are their sums in a thread:

    q [2 tokens, k] int8 · weight [n, k] ──▶ int32 [n, 2 tokens] ──▶ (coarse + fine / 254) * scales [n, tokens]

A nibble becomes the upper half of a byte, 16 times its number. Its groups of 128 have scales of their own, so their
sums are scaled one by one; those of int8, which are exact over the whole depth, at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graft.ops.fused_linear.gemm import add_parts, fetch_ahead, finish
from graft.ops.fused_linear.round_rows import FINER_STEPS
from graft.ops.fused_linear.widen import RUN_4

FLIP = tl.constexpr("xor.b32 $0, $1, 0x80808080;")
# Four words: one part of each in the upper half of a byte, with the sign bit turned over.
UPPER = "lop3.b32 $0, t, 0xF0F0F0F0, 0x80808080, 0x6A; }"  # (t & F0…) ^ 80…
NIBBLE_0 = tl.constexpr("{ .reg .b32 t; prmt.b32 t, $1, $2, 0x6420; shl.b32 t, t, 4; " + UPPER)
NIBBLE_1 = tl.constexpr("{ .reg .b32 t; prmt.b32 t, $1, $2, 0x6420; " + UPPER)
NIBBLE_2 = tl.constexpr("{ .reg .b32 t; prmt.b32 t, $1, $2, 0x7531; shl.b32 t, t, 4; " + UPPER)
NIBBLE_3 = tl.constexpr("{ .reg .b32 t; prmt.b32 t, $1, $2, 0x7531; " + UPPER)


@triton.jit
def signed(w, FAST: tl.constexpr):
    """Bytes of packing.py, which stand for their number less 128, as int8."""
    if FAST:
        return tl.inline_asm_elementwise(FLIP, "=r,r", [w], dtype=tl.int8, is_pure=True, pack=4)
    else:
        return w ^ -128


@triton.jit
def upper_nibbles(w, PART: tl.constexpr, FAST: tl.constexpr):
    """One part of 16-bit words, times 16, as int8."""
    if not FAST:
        return (((w.to(tl.int32) >> (4 * PART)) & 0xF) * 16 - 128).to(tl.int8)
    elif PART == 0:
        return tl.inline_asm_elementwise(NIBBLE_0, "=r,r,r", [w], dtype=tl.int8, is_pure=True, pack=4)
    elif PART == 1:
        return tl.inline_asm_elementwise(NIBBLE_1, "=r,r,r", [w], dtype=tl.int8, is_pure=True, pack=4)
    elif PART == 2:
        return tl.inline_asm_elementwise(NIBBLE_2, "=r,r,r", [w], dtype=tl.int8, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(NIBBLE_3, "=r,r,r", [w], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def halves_of(acc):
    """int32 [BN, 2 BM], coarse and fine sums in turn → two of [BN, BM]."""
    return tl.split(tl.reshape(acc, [acc.shape[0], acc.shape[1] // 2, 2]))


@triton.jit
def whole_sums(acc):
    """Of sums beyond 2^31 / 254, in fine steps, float32 [BN, BM]."""
    coarse, fine = halves_of(acc)
    return coarse.to(tl.float32) * FINER_STEPS + fine.to(tl.float32)


@triton.jit
def group_sums(acc, scale, row, n, group, groups):
    """Of one group of nibbles, exact in int32, times the rows' scales for it and 1 / 16, for upper_nibbles."""
    coarse, fine = halves_of(acc)
    factor = tl.load(scale + row * groups + group, mask=(row < n) & (group < groups), other=0.0).to(tl.float32)
    return (coarse * FINER_STEPS + fine).to(tl.float32) * (factor * 0.0625)[:, None]


@triton.jit
def sum_bytes(
    own, theirs, up, first, end, width, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """own: of the rows' weights, [BN, BK]; theirs: of the tokens, [2 BM, BK]; up: from a gate's row to its other."""
    acc = tl.zeros([BN, 2 * BM], tl.int32)
    acc_up = tl.zeros([BN, 2 * BM], tl.int32)
    lane = tl.arange(0, BK)[None, :]
    for step in range(first, end):
        at = step * BK
        if EVEN:
            w, h = tl.load(own + at), tl.load(theirs + at)
        else:
            w = tl.load(own + at, mask=at + lane < width, other=0)
            h = tl.load(theirs + at, mask=at + lane < width, other=0)
        acc = tl.dot(signed(w, FAST), tl.trans(h), acc, out_dtype=tl.int32)
        if GATED:
            v = tl.load(own + up + at) if EVEN else tl.load(own + up + at, mask=at + lane < width, other=0)
            acc_up = tl.dot(signed(v, FAST), tl.trans(h), acc_up, out_dtype=tl.int32)
    return whole_sums(acc), whole_sums(acc_up)


@triton.jit
def sum_nibbles(
    own, theirs, up, scale, row, first, end, n, groups, BN: tl.constexpr, BM: tl.constexpr, GATED: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """A step is a span, 128 words of a row: four groups."""
    y = tl.zeros([BN, BM], tl.float32)
    y_up = tl.zeros([BN, BM], tl.float32)
    for step in range(first, end):
        w = tl.load(own + step * RUN_4)
        v = w
        if GATED:
            v = tl.load(own + up + step * RUN_4)
        for part in tl.static_range(4):
            group = step * 4 + part
            h = tl.trans(tl.load(theirs + group * RUN_4))
            acc = tl.dot(upper_nibbles(w, part, FAST), h, out_dtype=tl.int32)
            y += group_sums(acc, scale, row, n, group, groups)
            if GATED:
                acc = tl.dot(upper_nibbles(v, part, FAST), h, out_dtype=tl.int32)
                y_up += group_sums(acc, scale + n * groups, row, n, group, groups)
    return y, y_up


@triton.jit(do_not_specialize=["tokens"])
def integer_gemm_kernel(
    q, steps, weight, bias, scale, residual, out, parts, arrived, n, width, tokens, blocks, groups, spread, alpha,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
    EVEN: tl.constexpr, KIND: tl.constexpr, FAST: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """width: bytes or words of a row of the weight; BK of them are a block. spread: blocks of tokens, whose programs
    follow each other, so that a block of rows comes from memory once. steps: coarse ones of the tokens."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block, split = tl.program_id(0) // spread, tl.program_id(1)
    row = block * BN + tl.arange(0, BN)
    token = tl.program_id(0) % spread * BM + tl.arange(0, BM)
    pair = tl.program_id(0) % spread * (2 * BM) + tl.arange(0, 2 * BM)
    lane = tl.arange(0, BK)[None, :]
    own = weight + tl.minimum(row, n - 1).to(tl.int64)[:, None] * width
    depth = width * (4 if KIND == "int4" else 1)
    theirs = q + tl.minimum(pair, 2 * tokens - 1).to(tl.int64)[:, None] * depth + lane
    up = (block.to(tl.int64) * 0 + n) * width  # n is no tensor where it is 1
    first, end = split * blocks // SPLITS, (split + 1) * blocks // SPLITS
    if PDL:
        if EARLY > 0:
            begin = weight + tl.minimum(row, n - 1).to(tl.int64) * width + first * BK
            values = tl.minimum(tl.minimum(EARLY, end - first) * BK, width - first * BK)
            size = values * (weight.dtype.element_ty.primitive_bitwidth // 8)
            fetch_ahead(begin, size)
            if GATED:
                fetch_ahead(begin + up, size)
        tl.extra.cuda.gdc_wait()
    if KIND == "int4":
        y, y_up = sum_nibbles(own + lane, theirs, up, scale, row, first, end, n, groups, BN, BM, GATED, FAST)
    else:
        y, y_up = sum_bytes(own + lane, theirs, up, first, end, width, BN, BM, BK, EVEN, GATED, FAST)
    fine = tl.load(steps + token, mask=token < tokens, other=0.0)[None, :] * (1.0 / FINER_STEPS)
    y, y_up, squares = y * fine, y_up * fine, tl.zeros([BM], tl.float32)
    last = True
    if SPLITS > 1:
        y, y_up, squares, last = add_parts(
            y, y_up, squares, parts, arrived, tl.program_id(0), split, BN, BM, SPLITS, GATED
        )
    if last:
        finish(
            y, y_up, squares, bias, scale, residual, alpha, out, row, token, n, width, tokens, 0.0,
            ACTIVATION, GATED, BIAS, KIND == "int8", False, RESIDUAL,
        )  # fmt: skip
