"""Attention of many new tokens of each sequence over a paged cache.

A program takes TOKENS tokens of one sequence with all queries of one key-value head's group, as one matrix. Which
tokens those are it finds in `cu_seqlens`: as many programs are launched as there can be, and those that find none
return. All sizes come from the device, so that a captured call may be replayed with others.

In such a call balanced/triton.py has the sequences that decode. They are passed over, but for those of a single
token, which cost nothing: the padding of a step may look like one of them, and its rows must hold numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graft.ops.cached_attention.tiles.triton import (
    LOG2E,
    LOWEST,
    UNALIGNED,
    UNSPECIAL,
    WIDENED,
    absorb,
    blocks_of,
    load_scales,
    logits,
    operand,
    widened,
)
from graft.ops.paged_cache import block_of


@triton.jit
def find_tile(cu_seqlens, n, TOKENS: tl.constexpr):
    """The sequence of this program and which of its tiles, or one behind its last; those with the most keys first.

    Sequence i has the programs from (cu_seqlens[i] - cu_seqlens[0]) // TOKENS + i on: at least as many as it has
    tiles, and found by halving, whatever n is, so that no number of sequences compiles the kernel anew.
    """
    index = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    base = tl.load(cu_seqlens).to(tl.int64)
    low, high = tl.program_id(0) * 0, n  # the last sequence that begins at or before this program
    while high - low > 1:
        middle = (low + high) // 2
        begins = (tl.load(cu_seqlens + middle) - base) // TOKENS + middle
        low, high = tl.where(begins <= index, middle, low), tl.where(begins <= index, high, middle)
    return low, index - ((tl.load(cu_seqlens + low) - base) // TOKENS + low)


@triton.jit
def visit(
    at, block, queries, position, table, k_cache, v_cache, kv, s_block, s_token, s_head, scale, window, softcap, end,
    best, total, result,
    d: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The state of the softmax after the tile of keys that begins at `at`."""
    dims = tl.arange(0, D)
    key_position = at + tl.arange(0, TILE)
    held = key_position < end  # the cache holds nothing of this sequence beyond
    inside = key_position % BLOCK
    base = block * s_block + inside * s_token + kv * s_head
    k_scales, v_scales = load_scales(k_cache, v_cache, block, inside, held, kv, s_block, s_token, BLOCK)
    block = blocks_of(table, key_position + TILE, end, BLOCK, True)  # a tile ahead
    mask = held[:, None] & (dims[None, :] < d)
    keys = tl.load(k_cache + base[:, None] + dims[None, :], mask=mask, other=0.0)  # [tile, d]
    values = tl.load(v_cache + base[:, None] + dims[None, :], mask=mask, other=0.0)
    keys, values = widened(keys, k_scales, queries.dtype), widened(values, v_scales, queries.dtype)
    scores = logits(queries, keys, 1.0, scale, softcap, HAS_SOFTCAP)  # [m, tile]
    if MASKED:
        seen = key_position[None, :] <= position[:, None]
        if HAS_WINDOW:
            seen = seen & (key_position[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
    best, total, result, _ = absorb(scores, values, 1.0, best, total, result, 0.0, queries.dtype)
    return block, best, total, result


@triton.jit(do_not_specialize=[*UNSPECIAL, "n", "decoded"], do_not_specialize_on_alignment=[*UNALIGNED, "cu_seqlens"])
def prefill_kernel(
    q, k_cache, v_cache, out, block_tables, cu_seqlens, seq_lens, sinks,
    sq_h, sq_t, s_block, s_token, s_head, s_table, scale, window, softcap, heads, n,
    decoded,
    d: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    kv = tl.program_id(1)
    row, tile = find_tile(cu_seqlens, n, TOKENS)
    start, stop, length = tl.load(cu_seqlens + row), tl.load(cu_seqlens + row + 1), tl.load(seq_lens + row)
    low = start + tile * TOKENS
    if low >= stop:
        return
    if (row < decoded) & (start == row) & (stop == row + 1) & (length > 1):
        return
    behind = length - stop  # a token's place in its sequence is its place in the row plus this
    m = tl.arange(0, TOKENS * GROUP_PAD)
    token = low + m // GROUP_PAD
    head = kv * GROUP + m % GROUP_PAD
    real = (token < stop) & (m % GROUP_PAD < GROUP)
    position = token + behind
    dims = tl.arange(0, D)
    q_mask = real[:, None] & (dims[None, :] < d)
    queries = tl.load(q + head[:, None] * sq_h + token[:, None] * sq_t + dims[None, :], mask=q_mask, other=0.0)
    queries = operand(queries, k_cache)
    if k_cache.dtype.element_ty == tl.float8e4nv:
        scale /= WIDENED
    best = tl.full([TOKENS * GROUP_PAD], LOWEST, tl.float32)
    total = tl.zeros([TOKENS * GROUP_PAD], tl.float32)
    if HAS_SINKS:
        best = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    result = tl.zeros([TOKENS * GROUP_PAD, D], tl.float32)
    table = block_tables + row.to(tl.int64) * s_table
    end = tl.minimum(low + TOKENS, stop) + behind
    if HAS_WINDOW:
        begin = tl.maximum(low + behind - window + 1, 0) // TILE * TILE
        block = blocks_of(table, begin + tl.arange(0, TILE), end, BLOCK, True)
    else:  # keys that every token of the tile sees
        full = (low + behind + 1) // TILE * TILE
        block = blocks_of(table, tl.arange(0, TILE), end, BLOCK, True)
        for at in range(0, full, TILE):
            block, best, total, result = visit(
                at, block, queries, position, table, k_cache, v_cache, kv, s_block, s_token, s_head,
                scale, window, softcap, end, best, total, result, d, D, BLOCK, TILE, False, HAS_WINDOW, HAS_SOFTCAP,
            )  # fmt: skip
        begin = full
    for at in range(begin, end, TILE):
        block, best, total, result = visit(
            at, block, queries, position, table, k_cache, v_cache, kv, s_block, s_token, s_head,
            scale, window, softcap, end, best, total, result, d, D, BLOCK, TILE, True, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    if v_cache.dtype.element_ty == tl.float8e4nv:
        result *= 1.0 / WIDENED
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    target = out + token[:, None] * heads * d + head[:, None] * d + dims[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=q_mask)


def prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, cu_seqlens: Tensor, seq_lens: Tensor,
    scale: float, window: int | None, softcap: float | None, sinks: Tensor | None, out: Tensor, decoded: int = 0,
) -> None:  # fmt: skip
    """Writes the rows cu_seqlens[0]:cu_seqlens[-1] of out [1, T, h, d]; q: [1, h, T, d]. decoded: of the first
    so many sequences those that decode, ahead of all others, have their rows already."""
    _, h, tokens, d = q.shape
    kv, n = k_cache.shape[2], seq_lens.shape[0]
    q = q if q.stride(-1) == 1 else q.contiguous()
    group = triton.next_power_of_2(h // kv)
    wide = max(16, triton.next_power_of_2(d))
    narrow = q.element_size() == 2
    rows, tile_bytes = (128, 16384) if narrow else (32, 8192)  # float32 has no tensor cores here and needs registers
    some = max(1, rows // group)
    prefill_kernel[(tokens // some + n, kv)](
        q, k_cache, v_cache, out, block_tables, cu_seqlens, seq_lens, q if sinks is None else sinks,
        q.stride(1), q.stride(2), *k_cache.stride()[:3], block_tables.stride(0),
        scale, window or 0, softcap or 1.0, h, n, decoded,
        d=d, GROUP=h // kv, GROUP_PAD=group, D=wide, BLOCK=block_of(k_cache), TOKENS=some,
        TILE=max(16, min(64, tile_bytes // (wide * q.element_size()))),
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
        num_warps=8, num_stages=3 if narrow else 2,
    )  # fmt: skip
