"""fused_linear for a full batch, on tensor cores: one program all tokens and as many rows as each multiprocessor gets
when they share them evenly.

Blocks of 64 rows leave the device uneven: 14,336 rows are 224 of them, two on 92 of its 132 multiprocessors and one
on 40, and those with two decide when it ends. With 112 rows a program, 128 have the same share, and the tokens are
read half as often. Blocks are powers of two in Triton, so a program's rows are a few of them: 112 = 64 + 32 + 16. The
tokens are the left operand, padded to 64 or 128; the rows are the right one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graft.ops.fused_linear.gemm import fetch_ahead
from graft.ops.swiglu.triton import activate


@triton.jit
def tile_row(first, BN: tl.constexpr, SIZE: tl.constexpr):
    """Rows of the tile of SIZE rows: behind those of the larger ones."""
    return first + BN // (2 * SIZE) * (2 * SIZE) + tl.arange(0, SIZE)


@triton.jit
def fetch_rows(weight, first, n, above, width, values, BN: tl.constexpr):
    """Asks for the first `values` of each row that load_rows will read; beyond n for the last again."""
    for digit in tl.static_range(5):
        if BN & (256 >> digit):
            row = tl.minimum(tile_row(first, BN, 256 >> digit), n - 1)
            size = values * (weight.dtype.element_ty.primitive_bitwidth // 8)
            fetch_ahead(weight + (row + above).to(tl.int64) * width, size)


@triton.jit
def load_rows(weight, first, column, n, above, width, BN: tl.constexpr):
    """Rows first … first + BN - 1 as tiles, [SIZE, BK] each, the largest first. above: rows of the weight before."""
    tiles = ()
    for digit in tl.static_range(5):
        if BN & (256 >> digit):
            row = tile_row(first, BN, 256 >> digit)
            at = (row + above).to(tl.int64)[:, None] * width + column[None, :]
            mask = (row < n)[:, None] & (column < width)[None, :]
            tiles = tiles + (tl.load(weight + at, mask=mask, other=0.0),)
    return tiles


@triton.jit
def nothing_yet(BM: tl.constexpr, BN: tl.constexpr):
    """A sum for each tile of rows, [BM, SIZE]."""
    sums = ()
    for digit in tl.static_range(5):
        if BN & (256 >> digit):
            sums = sums + (tl.zeros([BM, 256 >> digit], tl.float32),)
    return sums


@triton.jit
def load_tokens(x, token, column, tokens, k, stride_x):
    """x as [BM, BK]."""
    mask = (token < tokens)[:, None] & (column < k)[None, :]
    return tl.load(x + token.to(tl.int64)[:, None] * stride_x + column[None, :], mask=mask, other=0.0)


@triton.jit
def add_matmuls(sums, h, tiles):
    """sums plus the products of the tokens, [BM, BK], with each tile of rows."""
    added = ()
    for one in tl.static_range(len(tiles)):
        added = added + (tl.dot(h, tl.trans(tiles[one]), sums[one], input_precision="ieee"),)
    return added


@triton.jit
def finish(
    y, up, bias, residual, alpha, out, row, token, n, tokens, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Bias, activation and residual of one tile in float32, rounded once. y, up: [BM, SIZE]."""
    inside = row < n
    if BIAS:
        y += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            up += tl.load(bias + n + row, mask=inside, other=0.0).to(tl.float32)[None, :]
        y = activate(y, ACTIVATION) * up
    elif ACTIVATION != "none":
        y = activate(y, ACTIVATION)
    mask = (token < tokens)[:, None] & inside[None, :]
    at = token.to(tl.int64)[:, None] * n + row[None, :]
    if RESIDUAL:
        y = y * alpha + tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def balanced_gemm_kernel(
    x, weight, bias, residual, out, parts, arrived, n, k, tokens, stride_x, alpha,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN: rows a program, the sum of at most five powers of two from 16 to 256."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block, split = tl.program_id(0), tl.program_id(1)
    token = tl.program_id(2) * BM + tl.arange(0, BM)
    lane = tl.arange(0, BK)
    steps = tl.cdiv(k, BK)
    begin, end = split * steps // SPLITS, (split + 1) * steps // SPLITS
    if PDL:
        if EARLY > 0:
            values = tl.minimum(tl.minimum(EARLY, end - begin) * BK, k - begin * BK)
            fetch_rows(weight + begin * BK, block * BN, n, 0, k, values, BN)
            if GATED:
                fetch_rows(weight + begin * BK, block * BN, n, n, k, values, BN)
        tl.extra.cuda.gdc_wait()
    ys = nothing_yet(BM, BN)
    ups = ys
    for step in range(begin, end):
        column = step * BK + lane
        rows = load_rows(weight, block * BN, column, n, 0, k, BN)
        h = load_tokens(x, token, column, tokens, k, stride_x)
        ys = add_matmuls(ys, h, rows)
        if GATED:
            ups = add_matmuls(ups, h, load_rows(weight, block * BN, column, n, n, k, BN))
    last = True
    if SPLITS > 1:
        own = block + tl.program_id(2) * tl.num_programs(0)
        ys, ups, last = add_parts(ys, ups, parts, arrived, own, split, BN, BM, SPLITS, GATED)
    if last:
        for digit in tl.static_range(5):
            if BN & (256 >> digit):
                row = tile_row(block * BN, BN, 256 >> digit)
                y, up = ys[tile_at(BN, digit)], ups[tile_at(BN, digit)]
                finish(y, up, bias, residual, alpha, out, row, token, n, tokens, ACTIVATION, GATED, BIAS, RESIDUAL)


@triton.constexpr_function
def tile_at(BN, digit):
    """Which of the tiles has 256 >> digit rows."""
    return (BN >> (9 - digit)).bit_count()


@triton.jit
def add_parts(
    ys, ups, parts, arrived, block, split, BN: tl.constexpr, BM: tl.constexpr, SPLITS: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Leaves this program's part; the last to arrive has them all, in a fixed order, and sets the counter back."""
    SIZE: tl.constexpr = BN * BM
    ALL: tl.constexpr = 2 * SIZE if GATED else SIZE
    first = parts + block.to(tl.int64) * SPLITS * ALL
    leave(ys, first + split * ALL, BM)
    if GATED:
        leave(ups, first + split * ALL + SIZE, BM)
    tl.debug_barrier()  # every thread has stored before one of them says so
    last = tl.atomic_add(arrived + block, 1, sem="acq_rel") == SPLITS - 1
    if last:
        ys = nothing_yet(BM, BN)
        ups = ys
        for other in tl.static_range(SPLITS):
            ys = take(ys, first + other * ALL, BM)
            if GATED:
                ups = take(ups, first + other * ALL + SIZE, BM)
        tl.store(arrived + block, 0)
    return ys, ups, last


@triton.jit
def positions(BM: tl.constexpr, SIZE: tl.constexpr):
    """Of a tile's numbers, row by row, [BM, SIZE]."""
    return tl.arange(0, BM)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]


@triton.jit
def leave(sums, at, BM: tl.constexpr):
    """Stores the tiles one behind another."""
    for one in tl.static_range(len(sums)):
        tl.store(at + positions(BM, sums[one].shape[1]), sums[one])
        at += BM * sums[one].shape[1]


@triton.jit
def take(sums, at, BM: tl.constexpr):
    """sums plus the tiles that lie at `at`."""
    added = ()
    for one in tl.static_range(len(sums)):
        tile = tl.load(at + positions(BM, sums[one].shape[1]), cache_modifier=".cg")
        added = added + (sums[one] + tile,)
        at += BM * sums[one].shape[1]
    return added
