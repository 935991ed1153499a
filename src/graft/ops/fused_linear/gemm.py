"""fused_linear for some tokens, on tensor cores: one program a block of rows of the weight and all tokens.

The weight is the left operand and is read once; the tokens, padded to 16, 32, 64 or 128, are the right one. Where the
rows give too few programs to fill the device, several share the rows of one and each takes a part of the depth; the
last of them to end adds the parts up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graft.ops.fused_linear.widen import columns_of, take_pair, take_part
from graft.ops.swiglu.triton import activate

FETCH = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;")


@triton.jit
def fetch_ahead(pointers, size):
    """Asks for `size` bytes behind each pointer to be in L2; nothing waits for them. In one piece: sector by sector
    they would come from memory in as many."""
    tl.inline_asm_elementwise(FETCH, "=r,l,r", [pointers, size], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_tokens(
    x, norm, token, depth, tokens, k, stride_x, offset, squares, NORM: tl.constexpr, WEIGHTED: tl.constexpr
):  # fmt: skip
    """x as [depth, tokens], times the norm's weight, and its squares added to `squares`."""
    mask = (depth < k)[:, None] & (token < tokens)[None, :]
    h = tl.load(x + token.to(tl.int64)[None, :] * stride_x + depth[:, None], mask=mask, other=0.0)
    if NORM:
        wide = h.to(tl.float32)
        squares += wide * wide
        if WEIGHTED:
            g = tl.load(norm + depth, mask=depth < k, other=0.0).to(tl.float32) + offset
            h = (wide * g[:, None]).to(x.dtype.element_ty)
    return h, squares


@triton.jit
def narrow(w, PART: tl.constexpr, dtype: tl.constexpr, KIND: tl.constexpr, FAST: tl.constexpr):
    """A part of the weights in the dtype of x, exactly."""
    if FAST and KIND == "int4":
        return take_pair(w, PART)
    else:
        return take_part(w, PART, dtype, KIND)


@triton.jit
def dot_block(
    acc, acc_up, w, v, h, row, n, group, groups, scale, PART: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """acc plus the product of a block of rows and depth; of 4-bit weights one group of a span, times its scale."""
    dtype: tl.constexpr = h.dtype
    if KIND == "int4":
        inside = (row < n) & (group < groups)
        factor = tl.load(scale + row * groups + group, mask=inside, other=0.0).to(tl.float32)
        acc += tl.dot(narrow(w, PART, dtype, KIND, FAST), h, input_precision="ieee") * factor[:, None]
        if GATED:
            factor = tl.load(scale + (n + row) * groups + group, mask=inside, other=0.0).to(tl.float32)
            acc_up += tl.dot(narrow(v, PART, dtype, KIND, FAST), h, input_precision="ieee") * factor[:, None]
    else:
        acc = tl.dot(narrow(w, PART, dtype, KIND, FAST), h, acc, input_precision="ieee")
        if GATED:
            acc_up = tl.dot(narrow(v, PART, dtype, KIND, FAST), h, acc_up, input_precision="ieee")
    return acc, acc_up


@triton.jit
def finish(
    acc, acc_up, squares, bias, scale, residual, alpha, out, row, token, n, k, tokens, eps,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Scale, norm, bias, activation and residual in float32, rounded once. acc: [BN, BM]; squares: [BM]."""
    inside = row < n
    if SCALE:
        acc *= tl.load(scale + row, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up *= tl.load(scale + n + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    if NORM:
        inverse = tl.rsqrt(squares / k + eps)[None, :]
        acc *= inverse
        acc_up *= inverse
    if BIAS:
        acc += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(bias + n + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = activate(acc, ACTIVATION) * acc_up
    elif ACTIVATION != "none":
        acc = activate(acc, ACTIVATION)
    mask = inside[:, None] & (token < tokens)[None, :]
    at = token.to(tl.int64)[None, :] * n + row[:, None]
    if RESIDUAL:
        acc = acc * alpha + tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def gemm_kernel(
    x, weight, bias, scale, norm, residual, out, parts, arrived,
    n, k, width, groups, tokens, stride_x, eps, offset, alpha,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
    KIND: tl.constexpr, PARTS: tl.constexpr, FAST: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    NORM: tl.constexpr, WEIGHTED: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """width: numbers or words of a row of the weight, in memory; BK of them are a block, of 4-bit weights a span.
    EARLY: blocks of the weight that are fetched into the cache before the wait."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block, split = tl.program_id(0), tl.program_id(1)
    row = block * BN + tl.arange(0, BN)
    token = tl.program_id(2) * BM + tl.arange(0, BM)
    lane = tl.arange(0, BK)
    acc = tl.zeros([BN, BM], tl.float32)
    acc_up = tl.zeros([BN, BM], tl.float32)
    squares = tl.zeros([BK, BM], tl.float32)
    own = weight + row.to(tl.int64)[:, None] * width
    steps = tl.cdiv(width, BK)
    first, end = split * steps // SPLITS, (split + 1) * steps // SPLITS
    if PDL:
        if EARLY > 0:
            if (block + 1) * BN <= n:
                begin = weight + row.to(tl.int64) * width + first * BK
                values = tl.minimum(tl.minimum(EARLY, end - first) * BK, width - first * BK)
                size = values * (weight.dtype.element_ty.primitive_bitwidth // 8)
                fetch_ahead(begin, size)
                if GATED:
                    fetch_ahead(begin + n.to(tl.int64) * width, size)
        tl.extra.cuda.gdc_wait()
    for step in range(first, end):
        column = step * BK + lane
        mask = (row < n)[:, None] & (column < width)[None, :]
        w = tl.load(own + column[None, :], mask=mask, other=0)
        v = w
        if GATED:
            v = tl.load(own + n.to(tl.int64) * width + column[None, :], mask=mask, other=0)
        for part in tl.static_range(PARTS):
            depth = columns_of(step * BK, lane, part, KIND)
            h, squares = load_tokens(x, norm, token, depth, tokens, k, stride_x, offset, squares, NORM, WEIGHTED)
            acc, acc_up = dot_block(
                acc, acc_up, w, v, h, row, n, step * PARTS + part, groups, scale, part, KIND, GATED, FAST
            )
    total = tl.sum(squares, axis=0)  # [BM]
    last = True
    if SPLITS > 1:
        own_parts = block + tl.program_id(2) * tl.num_programs(0)
        acc, acc_up, total, last = add_parts(
            acc, acc_up, total, parts, arrived, own_parts, split, BN, BM, SPLITS, GATED
        )
    if last:
        finish(
            acc, acc_up, total, bias, scale, residual, alpha, out, row, token, n, k, tokens, eps,
            ACTIVATION, GATED, BIAS, SCALE, NORM, RESIDUAL,
        )  # fmt: skip


@triton.jit
def add_parts(
    acc, acc_up, total, parts, arrived, block, split, BN: tl.constexpr, BM: tl.constexpr, SPLITS: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Leaves this program's part; the last to arrive has them all, in a fixed order, and sets the counter back."""
    SIZE: tl.constexpr = BN * BM
    ALL: tl.constexpr = (2 * SIZE if GATED else SIZE) + BM
    tile = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    first = parts + block.to(tl.int64) * SPLITS * ALL
    own = first + split * ALL
    tl.store(own + tile, acc)
    if GATED:
        tl.store(own + SIZE + tile, acc_up)
    tl.store(own + ALL - BM + tl.arange(0, BM), total)
    tl.debug_barrier()  # every thread has stored before one of them says so
    last = tl.atomic_add(arrived + block, 1, sem="acq_rel") == SPLITS - 1
    if last:
        acc = tl.zeros([BN, BM], tl.float32)
        acc_up = tl.zeros([BN, BM], tl.float32)
        total = tl.zeros([BM], tl.float32)
        for other in tl.static_range(SPLITS):
            acc += tl.load(first + other * ALL + tile, cache_modifier=".cg")
            if GATED:
                acc_up += tl.load(first + other * ALL + SIZE + tile, cache_modifier=".cg")
            total += tl.load(first + other * ALL + ALL - BM + tl.arange(0, BM), cache_modifier=".cg")
        tl.store(arrived + block, 0)
    return acc, acc_up, total, last
