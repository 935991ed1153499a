"""Attention of one new token of few sequences whose context is not long.

A program takes one sequence, one key-value head with all queries of its group, and one part of the context: 256
positions at once (128 for heads of 128), which it holds in registers. Few programs run then, and what counts is how
soon the first result is there. So keys and values are on their way before the program waits for the kernel ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graft.ops.cached_attention.newest.triton import (
    absorb_newest,
    keep_new,
    load_new,
    newest_of,
    own_of,
    take_queries,
)
from graft.ops.cached_attention.parts.triton import leave, load_tile, part_of
from graft.ops.cached_attention.tiles.triton import (
    LOWEST,
    UNALIGNED,
    UNSPECIAL,
    absorb,
    blocks_of,
    inside_blocks,
    logits,
    no_values,
    operand,
    seen_of,
    settled,
)


@triton.jit(do_not_specialize=UNSPECIAL, do_not_specialize_on_alignment=UNALIGNED)
def early_kernel(
    q, k_cache, v_cache, out, partial, stats, counters, block_tables, seq_lens, sinks, k, v, cos, sin, q_norm, k_norm,
    sq_h, sq_t, s_block, s_token, s_head, s_table, sk_h, sk_t, sv_h, sv_t, sc_t, ss_t, scale, window, softcap, eps,
    offset, heads,
    d: tl.constexpr, GROUP: tl.constexpr, GROUP_FEW: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, TURN: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first tile is on its way before the wait, all but the newest key and value: those alone may be written by
    the kernel ahead. TURN (decode_call.py): whether queries and the newest key are normed and rotated here, and how.
    That key and its value are then written into the cache by the program whose part has them."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seq_lens + row).to(tl.int32)
    first, begin, chunk, used = part_of(length, window, SPLITS, TILE, 1, HAS_WINDOW)
    if split >= used:  # also ahead of the wait: the first part waits, and leaves its place to the next kernel
        return
    start = begin + split * chunk
    end = tl.minimum(start + chunk, length)
    table = block_tables + row * s_table
    caches = (k_cache, v_cache, s_block, s_token, s_head)
    position = start + tl.arange(0, TILE)
    block, inside = blocks_of(table, position, length, BLOCK, WIDE), inside_blocks(start, BLOCK, TILE)
    old = seen_of(position, first, length - 1, HAS_WINDOW)
    keys, values, k_scales, v_scales = load_tile(caches, block, inside, old, kv, d, D, BLOCK)
    newest = newest_of(caches, table, length, kv, BLOCK)
    here = (end == length) & (length > 0)  # the newest token is in this part
    if PDL:
        tl.extra.cuda.gdc_wait()
    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, D)
    head = kv * GROUP + group
    q_mask = (group[:, None] < GROUP) & (dims[None, :] < d)
    source = q + head[:, None] * sq_h + row * sq_t
    own = own_of(k, v, cos, sin, q_norm, k_norm, eps, offset, (sk_h, sk_t, sv_h, sv_t, sc_t, ss_t), kv, row)
    queries = operand(take_queries(source, q_mask, own, d, D, TURN), k_cache)
    new = load_new(own, newest, d, D, TURN)
    best = tl.full([GROUP_PAD], LOWEST, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    result, second = no_values(v_cache, GROUP_PAD, D)
    scores = tl.where(old[None, :], logits(queries, keys, k_scales, scale, softcap, HAS_SOFTCAP), -float("inf"))
    best, total, result, second = absorb(scores, values, v_scales, best, total, result, second, queries.dtype)
    for at in range(start + TILE, end, TILE):
        position = at + tl.arange(0, TILE)
        block, inside = blocks_of(table, position, length, BLOCK, WIDE), inside_blocks(at, BLOCK, TILE)
        old = position < tl.minimum(end, length - 1)
        keys, values, k_scales, v_scales = load_tile(caches, block, inside, old, kv, d, D, BLOCK)
        scores = logits(queries, keys, k_scales, scale, softcap, HAS_SOFTCAP)  # [group, tile]
        scores = tl.where(old[None, :], scores, -float("inf"))
        best, total, result, second = absorb(scores, values, v_scales, best, total, result, second, queries.dtype)
    result = settled(result, second, v_cache)
    if here:
        key, value = keep_new(new, own, newest, d, D, TURN)
        best, total, result = absorb_newest(queries, key, value, best, total, result, scale, softcap, HAS_SOFTCAP)
    leave(
        best, total, result, partial, stats, out, counters, sinks, row, kv, split, used, heads,
        d, D, SPLITS, GROUP, GROUP_FEW, GROUP_PAD, HAS_SINKS,
    )  # fmt: skip
