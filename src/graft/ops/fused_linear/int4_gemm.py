"""fused_linear of 4-bit weights for up to 8 tokens: from memory straight into operands of tensor cores.

One instruction multiplies 16 rows with 8 tokens over a depth of 16. Of its operands thread 4 g + c of a warp holds
two words of two values from row g, from row g + 8 and from token g each; which places of the depth is free, as long
as rows and tokens agree. So a thread reads 16 bytes of both rows as they lie in memory (packing.py), a piece, and the
values of its token that these meet; nothing goes through shared memory before the end. Of the result it has rows g
and g + 8 for tokens 2 c and 2 c + 1. With a gate, rows 8 to 15 are those of `up`.

A nibble in the mantissa of 128 makes 136 too much; rows of -136 with the same tokens have what is taken off. Squares
for the norm come from the same instruction, tokens times tokens. A warp takes two spans in a step: of these a row has
8 scales, 16 bytes. Tensors of words are [32 W, 4] for W warps, a line a thread: that is the layout of loads of 16
bytes, and the launch sees to it that they can be.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graft.ops.fused_linear.gemm import finish
from graft.ops.fused_linear.int4_mma import MINUS_136, add_scaled, multiply, nibbles_of, weigh

SPAN_WORDS = tl.constexpr(64)  # of 32 bits in a row; of x 256


@triton.jit
def rows_of(block, g, n, GATED: tl.constexpr):
    """The two rows of a thread, [32 W, 1]; beyond the last that one."""
    if GATED:
        low = tl.minimum(block * 8 + g, n - 1)
        return low, low + n
    else:
        return tl.minimum(block * 16 + g, n - 1), tl.minimum(block * 16 + 8 + g, n - 1)


@triton.jit
def pointers_of(weight, scale, rows, end, groups):
    """To the first words of both rows, of weights and of scales."""
    low, high = rows
    weights = (weight + low.to(tl.int64) * end, weight + high.to(tl.int64) * end)
    return weights, (scale + low * (groups // 2), scale + high * (groups // 2))


@triton.jit
def load_span(rows, at, inside, SPAN: tl.constexpr, COUNT: tl.constexpr, SHARE: tl.constexpr):
    """Pieces of a thread in a span, of both rows. at: its first word in the step; what is not inside may be anything,
    since it has no scales."""
    pieces = ()
    for i in tl.static_range(COUNT):
        position = at + SPAN * SPAN_WORDS + i * (16 * SHARE)
        low = tl.load(rows[0] + position, mask=inside, eviction_policy="evict_first")
        high = tl.load(rows[1] + position, mask=inside, eviction_policy="evict_first")
        pieces = pieces + ((low, high),)
    return pieces


@triton.jit
def load_scales(scales, at, inside):
    return tl.load(scales[0] + at, mask=inside, other=0), tl.load(scales[1] + at, mask=inside, other=0)


@triton.jit
def load_x(x, at, inside, EVEN: tl.constexpr):
    return tl.load(x + at) if EVEN else tl.load(x + at, mask=inside, other=0)


@triton.jit
def add_span(
    y, squares, pieces, scales, x, norm, at, token, inside, SPAN: tl.constexpr, COUNT: tl.constexpr,
    SHARE: tl.constexpr, NORM: tl.constexpr, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """y plus the products of a span: part by part, which is a group, times its scale. at: of a thread's first value
    in a row of x, in words; token: where its row begins."""
    minus = tl.full(pieces[0][0].shape, MINUS_136, tl.int32)
    for part in tl.static_range(4):
        acc = tl.zeros(y.shape, tl.float32)
        taken = tl.zeros(y.shape, tl.float32)
        for i in tl.static_range(COUNT):
            position = at + (SPAN * 4 + part) * SPAN_WORDS + i * (16 * SHARE)
            raw = load_x(x, position + token, inside, EVEN)
            h = raw
            if WEIGHTED:
                h = weigh(raw, load_x(norm, position, inside, EVEN), FAST)
            low, high = nibbles_of(pieces[i][0], part, FAST), nibbles_of(pieces[i][1], part, FAST)
            acc = multiply(low, high, h, acc, FAST)
            if NORM and not WEIGHTED:
                taken = multiply(raw, minus, raw, taken, FAST)
            else:
                taken = multiply(minus, minus, h, taken, FAST)
                if NORM:
                    squares = multiply(raw, tl.zeros_like(raw), raw, squares, FAST)
        if NORM and not WEIGHTED:
            squares += taken
        y = add_scaled(y, acc, taken, scales, 4 * SPAN + part, FAST)
    return y, squares


@triton.jit
def add_step(
    y, squares, fore, aft, scales, x, norm, at_x, token, inside, rows, then, more, COUNT: tl.constexpr,
    SHARE: tl.constexpr, NORM: tl.constexpr, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """y plus the products of two spans. Behind each, pieces at `then` of `rows` are asked for, if there are more."""
    y, squares = add_span(
        y, squares, fore, scales, x, norm, at_x, token, inside, 0, COUNT, SHARE, NORM, WEIGHTED, EVEN, FAST
    )
    fore = load_span(rows, then, more, 0, COUNT, SHARE)
    y, squares = add_span(
        y, squares, aft, scales, x, norm, at_x, token, inside, 1, COUNT, SHARE, NORM, WEIGHTED, EVEN, FAST
    )
    return y, squares, fore, load_span(rows, then, more, 1, COUNT, SHARE)


@triton.jit
def by_result(values):
    """[32 W, 4] → four [W, 32]: rows g and g + 8 for an even token, then for an odd one."""
    WARPS: tl.constexpr = values.shape[0] // 32
    even, odd = tl.split(tl.reshape(values, [32 * WARPS, 2, 2]))
    low, high = tl.split(even)
    low_odd, high_odd = tl.split(odd)
    low, high = tl.reshape(low, [WARPS, 32]), tl.reshape(high, [WARPS, 32])
    return low, high, tl.reshape(low_odd, [WARPS, 32]), tl.reshape(high_odd, [WARPS, 32])


@triton.jit
def add_2(a, b, c, d):
    return a + c, b + d


@triton.jit
def add_3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def finish_tokens(
    low, high, squares, bias, residual, alpha, out, first, n, k, tokens, eps, ODD: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Adds up what the warps have for even or for odd tokens, [W, 32] each, and writes it.

    In one exchange of single values: threads lie W apart in it, and with the four of a thread together 4 W, where
    16 of them met in one bank of shared memory; that took longer than the GEMM.
    """
    token = 2 * tl.arange(0, 4) + ODD
    total = tl.zeros([4], tl.float32)
    if NORM:
        low, high, squares = tl.reduce((low, high, squares), 0, add_3)
        itself = tl.arange(0, 8)[:, None] == token[None, :]  # products of token g with tokens 2 c + ODD
        total = tl.sum(tl.where(itself, tl.reshape(squares, [8, 4]), 0.0), axis=0)
    else:
        low, high = tl.reduce((low, high), 0, add_2)
    low = tl.reshape(low, [8, 4])
    high = tl.reshape(high, [8, 4])
    row = first + tl.arange(0, 8)
    finish(
        low, high, total, bias, bias, residual, alpha, out, row, token, n, k, tokens, eps,
        ACTIVATION, GATED, BIAS, False, NORM, RESIDUAL,
    )  # fmt: skip
    if not GATED:
        finish(
            high, high, total, bias, bias, residual, alpha, out, row + 8, token, n, k, tokens, eps,
            ACTIVATION, GATED, BIAS, False, NORM, RESIDUAL,
        )  # fmt: skip


@triton.jit
def finish_block(
    y, squares, bias, residual, alpha, out, block, n, k, tokens, eps, ONE: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    first = block * (8 if GATED else 16)
    low, high, low_odd, high_odd = by_result(y)
    own, _, own_odd, _ = by_result(squares)
    finish_tokens(
        low, high, own, bias, residual, alpha, out, first, n, k, tokens, eps, 0, ACTIVATION, GATED, BIAS, NORM,
        RESIDUAL,
    )  # fmt: skip
    if not ONE:
        finish_tokens(
            low_odd, high_odd, own_odd, bias, residual, alpha, out, first, n, k, tokens, eps, 1, ACTIVATION, GATED,
            BIAS, NORM, RESIDUAL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "steps", "blocks"])
def int4_gemm_kernel(
    x, weight, bias, scale, norm, residual, out, n, k, eighths, groups, tokens, steps, blocks, stride_x, eps, alpha,
    ONE: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr, WALKS: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, WEIGHTED: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    RESIDUAL: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x, weight, scale, norm: as words of 32 bits. A thread has AHEAD pieces of both rows on their way, those of two
    spans, and asks for the next as soon as it has used one: of the next step, or, where a step is the whole depth
    (WALKS), of the next block of rows. eighths: of the 16-bit words of a row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    COUNT: tl.constexpr = AHEAD // 2
    SHARE: tl.constexpr = 8 // AHEAD  # warps that a span is divided among
    STEP: tl.constexpr = 2 * SPAN_WORDS * WARPS // SHARE  # words of a row
    thread = tl.arange(0, 32 * WARPS)[:, None]
    g, own, pair = thread // 4 % 8, thread // 32 % SHARE * 16 + thread % 4 * 4, thread // 32 // SHARE
    word = tl.arange(0, 4)[None, :]
    x, norm, weight, scale = x + word, norm + word, weight + word, scale + word
    end = eighths * 4
    at, at_x, at_scale = pair * (2 * SPAN_WORDS) + own, pair * (8 * SPAN_WORDS) + own, pair * 4
    token = 0 if ONE else tl.minimum(g, tokens - 1) * (stride_x // 2)
    here = at < end
    block = tl.program_id(0)
    rows, scales = pointers_of(weight, scale, rows_of(block, g, n, GATED), end, groups)
    fore = load_span(rows, at, here, 0, COUNT, SHARE)
    aft = load_span(rows, at, here, 1, COUNT, SHARE)
    factors = load_scales(scales, at_scale, here)
    if PDL:
        tl.extra.cuda.gdc_wait()
    y = tl.zeros([32 * WARPS, 4], tl.float32)
    squares = tl.zeros([32 * WARPS, 4], tl.float32)
    if WALKS:
        for now in range(block, blocks, tl.num_programs(0)):
            then = now + tl.num_programs(0)
            rows, scales = pointers_of(weight, scale, rows_of(then, g, n, GATED), end, groups)
            y, squares, fore, aft = add_step(
                tl.zeros_like(y), tl.zeros_like(y), fore, aft, factors, x, norm, at_x, token, here, rows, at,
                here & (then < blocks), COUNT, SHARE, NORM, WEIGHTED, EVEN, FAST,
            )  # fmt: skip
            factors = load_scales(scales, at_scale, here & (then < blocks))
            finish_block(
                y, squares, bias, residual, alpha, out, now, n, k, tokens, eps, ONE, ACTIVATION, GATED, BIAS, NORM,
                RESIDUAL,
            )  # fmt: skip
    else:
        for step in range(steps):
            then = at + (step + 1) * STEP
            y, squares, fore, aft = add_step(
                y, squares, fore, aft, factors, x, norm, at_x + step * (4 * STEP), token, then - STEP < end, rows,
                then, then < end, COUNT, SHARE, NORM, WEIGHTED, EVEN, FAST,
            )  # fmt: skip
            factors = load_scales(scales, at_scale + (step + 1) * (STEP // 32), then < end)
        finish_block(
            y, squares, bias, residual, alpha, out, block, n, k, tokens, eps, ONE, ACTIVATION, GATED, BIAS, NORM,
            RESIDUAL,
        )  # fmt: skip
