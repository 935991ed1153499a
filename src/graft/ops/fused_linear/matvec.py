"""fused_linear for a few tokens: one program a few rows of the weight, read once, tile by tile.

Tiles are on their way into registers before the program waits for the kernel ahead of it: weights do not depend on
that one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graft.ops.fused_linear.widen import RUN_4, as_float, columns_of, widen
from graft.ops.swiglu.triton import activate


@triton.jit
def load_tiles(
    weight, row, lane, n, k, FIRST: tl.constexpr, END: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Tiles FIRST … END - 1 of the rows, [BN, BK] each."""
    tiles = ()
    for step in tl.static_range(FIRST, END):
        mask = (row < n)[:, None]
        if not EVEN:
            mask = mask & (step * BK + lane < k)[None, :]
        at = row.to(tl.int64)[:, None] * k + step * BK + lane[None, :]
        tiles = tiles + (tl.load(weight + at, mask=mask, other=0, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def nothing_yet(TOKENS: tl.constexpr, BN: tl.constexpr, EIGHTHS: tl.constexpr):
    """For each token the products with the gate's or only rows and with up's, [BN, EIGHTHS], squares and sums,
    [EIGHTHS]: a thread adds up the 8 that it has of a tile at once."""
    ys = ()
    ups = ()
    squares = ()
    sums = ()
    for _ in tl.static_range(TOKENS):
        ys = ys + (tl.zeros([BN, EIGHTHS], tl.float32),)
        ups = ups + (tl.zeros([BN, EIGHTHS], tl.float32),)
        squares = squares + (tl.zeros([EIGHTHS], tl.float32),)
        sums = sums + (tl.zeros([EIGHTHS], tl.float32),)
    return ys, ups, squares, sums


@triton.jit
def load_token(
    x, norm, norm_bias, token, column, k, stride_x, offset, squares, moments, NORM: tl.constexpr,
    WEIGHTED: tl.constexpr, CENTER: tl.constexpr, SHIFTED: tl.constexpr, OFFSET: tl.constexpr, EVEN: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Values of one token, [BK], times the norm's weight, and its squares added to `squares`; of a LayerNorm the
    normed values, as `moments` has them."""
    mask = None if EVEN else column < k
    other = None if EVEN else 0.0
    h = as_float(tl.load(x + token * stride_x + column, mask=mask, other=other), FAST)
    if CENTER:
        h = (h - moments[0]) * moments[1]
    elif NORM:
        squares += by_eights(h * h)
    if WEIGHTED:
        g = as_float(tl.load(norm + column, mask=mask, other=other), FAST)
        h *= g + offset if OFFSET else g
    if SHIFTED:
        h += as_float(tl.load(norm_bias + column, mask=mask, other=other), FAST)
    return h, squares


@triton.jit
def moments_of(
    x, token, lane, k, stride_x, eps, BK: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """Mean and 1 / deviation of a token, which every program reads whole anyway: one exchange between threads, while
    tiles of the weight are on their way."""
    total = tl.zeros([BK // 8], tl.float32)
    squares = tl.zeros([BK // 8], tl.float32)
    for step in tl.static_range(STEPS):
        column = step * BK + lane
        mask = None if EVEN else column < k
        other = None if EVEN else 0.0
        h = as_float(tl.load(x + token * stride_x + column, mask=mask, other=other), FAST)
        total += by_eights(h)
        squares += by_eights(h * h)
    mean, square = tl.split(tl.sum(tl.join(total, squares), axis=0) / k)
    # in float32: what is lost is mean² / variance * 1e-7 of it
    return mean, tl.rsqrt(tl.maximum(square - mean * mean, 0.0) + eps)


@triton.jit
def by_eights(values):
    """[BK] or [BN, BK] → [BK / 8] or [BN, BK / 8], sums of what one thread holds."""
    if len(values.shape) == 1:
        return tl.sum(tl.reshape(values, [values.shape[0] // 8, 8]), axis=1)
    else:
        return tl.sum(tl.reshape(values, [values.shape[0], values.shape[1] // 8, 8]), axis=2)


@triton.jit
def group_scales(scale, row, first, n, groups, BK: tl.constexpr, PART: tl.constexpr):
    """Of 4-bit weights, the scale of each eight words, [BN, BK / 8]: part PART of a span is a group."""
    group = (first + 8 * tl.arange(0, BK // 8)) // RUN_4 * 4 + PART
    mask = (row < n)[:, None] & (group < groups)[None, :]
    return tl.load(scale + row[:, None] * groups + group[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def add_tile(
    ys, ups, squares, sums, moments, w, v, x, norm, norm_bias, scale, row, first, lane, n, k, groups, stride_x,
    offset, TOKENS: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr, PARTS: tl.constexpr, FAST: tl.constexpr,
    TOO_MUCH: tl.constexpr, NORM: tl.constexpr, WEIGHTED: tl.constexpr, CENTER: tl.constexpr, SHIFTED: tl.constexpr,
    OFFSET: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One tile of the rows for every token: each part of its words with the values of x that it meets."""
    qs = widen(w, KIND, FAST)
    rs = widen(v, KIND, FAST)
    new_ys = ()
    new_ups = ()
    new_squares = ()
    new_sums = ()
    for token in tl.static_range(TOKENS):
        y, up, square, total = ys[token], ups[token], squares[token], sums[token]
        for part in tl.static_range(PARTS):
            column = columns_of(first, lane, part, KIND)
            h, square = load_token(
                x, norm, norm_bias, token, column, k, stride_x, offset, square, moments[token], NORM, WEIGHTED,
                CENTER, SHIFTED, OFFSET, EVEN, FAST,
            )  # fmt: skip
            product = by_eights(qs[part] * h[None, :])  # [BN, BK / 8]
            product_up = by_eights(rs[part] * h[None, :]) if GATED else product
            if KIND == "int4":
                rest = TOO_MUCH * by_eights(h)[None, :]
                product = (product - rest) * group_scales(scale, row, first, n, groups, BK, part)
                if GATED:
                    above = scale + n.to(tl.int64) * groups
                    product_up = (product_up - rest) * group_scales(above, row, first, n, groups, BK, part)
            elif TOO_MUCH > 0:
                total += by_eights(h)
            y += product
            if GATED:
                up += product_up
        new_ys = new_ys + (y,)
        new_ups = new_ups + (up,)
        new_squares = new_squares + (square,)
        new_sums = new_sums + (total,)
    return new_ys, new_ups, new_squares, new_sums


@triton.jit
def finish(
    y, up, bias, scale, residual, alpha, out, row, token, n, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, SCALE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Scale, bias, activation and residual of one token in float32, rounded once. y, up: [BN]."""
    inside = row < n
    if SCALE:
        y *= tl.load(scale + row, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        if SCALE:
            up *= tl.load(scale + n + row, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            up += tl.load(bias + n + row, mask=inside, other=0.0).to(tl.float32)
        y = activate(y, ACTIVATION) * up
    elif ACTIVATION != "none":
        y = activate(y, ACTIVATION)
    at = token * n + row
    if RESIDUAL:
        y = y * alpha + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_rows(y, up, squares, k, eps, NORM: tl.constexpr, GATED: tl.constexpr):
    """The products [BN] of one token. The root mean square divides them after the sum: one pass over x, one exchange
    between threads."""
    if NORM:
        both = tl.join(y, tl.broadcast_to(squares[None, :], y.shape))  # [BN, EIGHTHS, 2]
        y, total = tl.split(tl.sum(both, axis=1))
        inverse = tl.rsqrt(total / k + eps)
    else:
        y = tl.sum(y, axis=1)
        inverse = 1.0
    up = tl.sum(up, axis=1) if GATED else y
    return y * inverse, up * inverse


@triton.jit(do_not_specialize=["eighths"])
def matvec_kernel(
    x, weight, bias, scale, norm, norm_bias, residual, out, n, k, eighths, groups, stride_x, eps, offset, alpha,
    TOKENS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, EARLY: tl.constexpr,
    EVEN: tl.constexpr, KIND: tl.constexpr, PARTS: tl.constexpr, FAST: tl.constexpr, TOO_MUCH: tl.constexpr,
    BIAS: tl.constexpr, SCALE: tl.constexpr, NORM: tl.constexpr, WEIGHTED: tl.constexpr, CENTER: tl.constexpr,
    SHIFTED: tl.constexpr, OFFSET: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """n: rows of the result; with a gate the weight has 2 n, the second n for `up`. eighths: of the numbers or words
    of a row in memory; BK of them are a tile, STEPS tiles are all, EVEN if none is cut off, and EARLY of them are on
    their way before the wait. NORM: x is divided by its root mean square; WEIGHTED: and multiplied with `norm`, plus
    `offset` where OFFSET. CENTER: less its mean before, and SHIFTED: plus `norm_bias` after."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    width = eighths * 8  # so that it is known to be a multiple
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    lane = tl.arange(0, BK)
    above = weight
    if GATED:
        above += n.to(tl.int64) * width
    ws = load_tiles(weight, row, lane, n, width, 0, EARLY, BK, EVEN)
    vs = load_tiles(above, row, lane, n, width, 0, EARLY if GATED else 0, BK, EVEN)
    if PDL:
        tl.extra.cuda.gdc_wait()
    moments = ()
    for token in tl.static_range(TOKENS):
        moments = moments + (
            moments_of(x, token, lane, k, stride_x, eps, BK, STEPS, EVEN, FAST) if CENTER else (0.0, 1.0),
        )
    ys, ups, squares, sums = nothing_yet(TOKENS, BN, BK // 8)
    for step in tl.static_range(STEPS):
        if step + EARLY < STEPS:
            ws = ws + load_tiles(weight, row, lane, n, width, step + EARLY, step + EARLY + 1, BK, EVEN)
            if GATED:
                vs = vs + load_tiles(above, row, lane, n, width, step + EARLY, step + EARLY + 1, BK, EVEN)
        ys, ups, squares, sums = add_tile(
            ys, ups, squares, sums, moments, ws[step], vs[step] if GATED else ws[step], x, norm, norm_bias, scale,
            row, step * BK, lane, n, k, groups, stride_x, offset, TOKENS, BK, KIND, PARTS, FAST, TOO_MUCH, NORM,
            WEIGHTED, CENTER, SHIFTED, OFFSET, GATED, EVEN,
        )  # fmt: skip
    for token in tl.static_range(TOKENS):
        own, own_up = ys[token], ups[token]
        if KIND != "int4" and TOO_MUCH > 0:
            own -= TOO_MUCH * sums[token][None, :]
            own_up -= TOO_MUCH * sums[token][None, :]
        y, up = sum_rows(own, own_up, squares[token], k, eps, NORM and not CENTER, GATED)
        finish(y, up, bias, scale, residual, alpha, out, row, token, n, ACTIVATION, GATED, BIAS, SCALE, RESIDUAL)
