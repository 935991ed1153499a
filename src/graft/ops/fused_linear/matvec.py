"""fused_linear for a few tokens: one program a few rows of the weight, read once, tile by tile.

The first tile is in registers, and more of the weight on its way into the cache, before the program waits for the
kernel ahead of it: weights do not depend on that one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graft.ops.swiglu.triton import activate

FETCH = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;")
FETCH_ONCE = tl.constexpr(
    "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
    " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }"
)


@triton.jit
def fetch_ahead(pointers, size, ONCE: tl.constexpr):
    """Asks for `size` bytes behind each pointer to be in L2; nothing waits for them. In one piece: sector by sector
    they would come from memory in as many. ONCE: every thread has all pointers, and the first asks."""
    if ONCE:
        tl.inline_asm_elementwise(FETCH_ONCE, "=r,l,r", [pointers, size], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.inline_asm_elementwise(FETCH, "=r,l,r", [pointers, size], dtype=tl.int32, is_pure=False, pack=1)


# Four bytes become four floats with one instruction each: laid into the mantissa of 32768 a byte makes 32768 + byte.
# With the sign bit turned over a byte is its number + 128, so all together are 32896 too large: SHIFT.
WIDEN_BYTES = tl.constexpr(
    "{ .reg .b32 u; xor.b32 u, $4, 0x80808080;"
    " prmt.b32 $0, u, 0x47000000, 0x7404; prmt.b32 $1, u, 0x47000000, 0x7414;"
    " prmt.b32 $2, u, 0x47000000, 0x7424; prmt.b32 $3, u, 0x47000000, 0x7434; }"
)
SHIFT = tl.constexpr(32896.0)


@triton.jit
def widen(w, BYTES: tl.constexpr):
    """float32, SHIFT too large where BYTES."""
    if BYTES:
        return tl.inline_asm_elementwise(WIDEN_BYTES, "=r,=r,=r,=r,r", [w], dtype=tl.float32, is_pure=True, pack=4)
    else:
        return w.to(tl.float32)


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
        tiles = tiles + (tl.load(weight + at, mask=mask, other=0.0, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def fetch_waves(
    weight, above, program, n, k, AHEAD: tl.constexpr, WAVES: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """The rows of the programs that are 1, 2, … WAVES times AHEAD further on go into the cache."""
    for wave in tl.static_range(1, WAVES + 1):
        if (program < AHEAD) & ((program + wave * AHEAD + 1) * BN <= n):
            later = (program + wave * AHEAD).to(tl.int64) * BN * k + tl.arange(0, 1)
            size = BN * k * (weight.dtype.element_ty.primitive_bitwidth // 8)
            fetch_ahead(weight + later, size, True)
            if GATED:
                fetch_ahead(above + later, size, True)


@triton.jit
def nothing_yet(TOKENS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """For each token the products with the gate's or only rows and with up's, [BN, BK], squares and sums, [BK]."""
    ys = ()
    ups = ()
    squares = ()
    sums = ()
    for _ in tl.static_range(TOKENS):
        ys = ys + (tl.zeros([BN, BK], tl.float32),)
        ups = ups + (tl.zeros([BN, BK], tl.float32),)
        squares = squares + (tl.zeros([BK], tl.float32),)
        sums = sums + (tl.zeros([BK], tl.float32),)
    return ys, ups, squares, sums


@triton.jit
def load_token(x, norm, token, column, k, stride_x, offset, squares, NORM: tl.constexpr, EVEN: tl.constexpr):
    """A tile of one token, [BK], times the norm's weight, and its squares added to `squares`."""
    mask = None if EVEN else column < k
    other = None if EVEN else 0.0
    h = tl.load(x + token * stride_x + column, mask=mask, other=other).to(tl.float32)
    if NORM:
        squares += h * h
        h *= tl.load(norm + column, mask=mask, other=other).to(tl.float32) + offset
    return h, squares


@triton.jit
def add_tile(
    ys, ups, squares, sums, w, v, x, norm, column, k, stride_x, offset, TOKENS: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr, EVEN: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """One tile of the rows for every token."""
    new_ys = ()
    new_ups = ()
    new_squares = ()
    new_sums = ()
    for token in tl.static_range(TOKENS):
        h, square = load_token(x, norm, token, column, k, stride_x, offset, squares[token], NORM, EVEN)
        up = ups[token]
        if GATED:
            up += widen(v, BYTES) * h[None, :]
        new_ys = new_ys + (ys[token] + widen(w, BYTES) * h[None, :],)
        new_ups = new_ups + (up,)
        new_squares = new_squares + (square,)
        new_sums = new_sums + (sums[token] + h if BYTES else sums[token],)
    return new_ys, new_ups, new_squares, new_sums


@triton.jit
def finish(
    y, up, bias, scale, residual, out, row, token, n, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    SCALE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Scale, bias, activation and residual of one token in float32, rounded once. y, up: [BN]."""
    inside = row < n
    if SCALE:
        y *= tl.load(scale + row, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION != "none":
        if SCALE:
            up *= tl.load(scale + n + row, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            up += tl.load(bias + n + row, mask=inside, other=0.0).to(tl.float32)
        y = activate(y, ACTIVATION) * up
    at = token * n + row
    if RESIDUAL:
        y += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["eighths"])
def matvec_kernel(
    x, weight, bias, scale, norm, residual, out, n, eighths, stride_x, eps, offset,
    TOKENS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, EARLY: tl.constexpr,
    AHEAD: tl.constexpr, WAVES: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """n: rows of the result; with a gate the weight has 2 n, the second n for `up`. STEPS tiles of BK are a row, EVEN
    if none is cut off; EARLY of them are on their way before the wait. AHEAD: the first AHEAD programs fetch the rows
    of the programs that are 1, 2, … WAVES times as many further on while they wait; 0 for none."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    GATED: tl.constexpr = ACTIVATION != "none"
    # Known to be a multiple of 8 and no more: so weights of 8 bits are read 8 a thread, as x is, and the two meet in
    # registers. With 16 a thread every tile would go through shared memory.
    k = eighths * 8
    program = tl.program_id(0)
    row = program * BN + tl.arange(0, BN)
    lane = tl.arange(0, BK)
    above = weight
    if GATED:
        above += n.to(tl.int64) * k
    ws = load_tiles(weight, row, lane, n, k, 0, EARLY, BK, EVEN)
    vs = load_tiles(above, row, lane, n, k, 0, EARLY if GATED else 0, BK, EVEN)
    if PDL:
        if AHEAD > 0:
            fetch_waves(weight, above, program, n, k, AHEAD, WAVES, BN, GATED)
        tl.extra.cuda.gdc_wait()
    ys, ups, squares, sums = nothing_yet(TOKENS, BN, BK)
    for step in tl.static_range(STEPS):
        if step + EARLY < STEPS:
            ws = ws + load_tiles(weight, row, lane, n, k, step + EARLY, step + EARLY + 1, BK, EVEN)
            if GATED:
                vs = vs + load_tiles(above, row, lane, n, k, step + EARLY, step + EARLY + 1, BK, EVEN)
        ys, ups, squares, sums = add_tile(
            ys, ups, squares, sums, ws[step], vs[step] if GATED else ws[step], x, norm, step * BK + lane, k, stride_x,
            offset, TOKENS, NORM, GATED, EVEN, BYTES,
        )  # fmt: skip
    for token in tl.static_range(TOKENS):
        own, own_up = ys[token], ups[token]
        if BYTES:
            own -= SHIFT * sums[token][None, :]
            own_up -= SHIFT * sums[token][None, :]
        if NORM:  # divided by the root mean square after the product: one pass over x, one exchange between threads
            both = tl.join(own, tl.broadcast_to(squares[token][None, :], [BN, BK]))  # [BN, BK, 2]
            y, total = tl.split(tl.sum(both, axis=1))
            inverse = tl.rsqrt(total / k + eps)
        else:
            y = tl.sum(own, axis=1)
            inverse = tl.full([BN], 1.0, tl.float32)
        up = tl.sum(own_up, axis=1) if GATED else y
        finish(
            y * inverse, up * inverse, bias, scale, residual, out, row, token, n, ACTIVATION, BIAS, SCALE, RESIDUAL
        )
