"""Attention of one new token of few sequences whose context is not long.

A program takes one sequence, one key-value head with all queries of its group, and one part of the context: 256
places at once, which it holds in registers. Few programs run then, and what counts is how soon the first result is
there. So keys and values are on their way before the program waits for the kernel ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graft.ops.cached_attention.parts.triton import leave, load_tile, part_of
from graft.ops.cached_attention.tiles.triton import LOWEST, UNALIGNED, UNSPECIAL, absorb, blocks_of, logits


@triton.jit
def turned(x, cos, sin, dims, mask, d: tl.constexpr, dtype: tl.constexpr, ROUND: tl.constexpr):
    """Values of heads at x + dims, turned: pairs are i and i + d / 2. ROUND: products are rounded, as in eager."""
    first = dims < d // 2
    own = tl.load(x + dims, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(x + tl.where(first, dims + d // 2, dims - d // 2), mask=mask, other=0.0).to(tl.float32)
    a = own * tl.load(cos + dims, mask=dims < d, other=0.0).to(tl.float32)
    b = tl.where(first, -other, other) * tl.load(sin + dims, mask=dims < d, other=0.0).to(tl.float32)
    if ROUND:
        a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
    return (a + b).to(dtype)


@triton.jit
def take_new(
    q, q_mask, own, key_place, value_place, here, d: tl.constexpr, D: tl.constexpr, TURNS: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    """Queries [group, d], and the newest key and value [d]: from the cache, or turned and, if `here`, written there.
    own: of k, v, cos, sin."""
    dims = tl.arange(0, D)
    inside = dims < d
    if TURNS:
        dtype: tl.constexpr = key_place.dtype.element_ty
        queries = turned(q, own[2], own[3], dims[None, :], q_mask, d, dtype, ROUND)
        key = turned(own[0], own[2], own[3], dims, inside, d, dtype, ROUND)
        value = tl.load(own[1] + dims, mask=inside, other=0.0)
        tl.store(key_place + dims, key, mask=inside & here)
        tl.store(value_place + dims, value, mask=inside & here)
        tl.debug_barrier()  # a part of several tiles reads them again
    else:
        queries = tl.load(q + dims[None, :], mask=q_mask, other=0.0)
        key = tl.load(key_place + dims, mask=inside, other=0.0)
        value = tl.load(value_place + dims, mask=inside, other=0.0)
    return queries, key, value


@triton.jit(do_not_specialize=UNSPECIAL, do_not_specialize_on_alignment=UNALIGNED)
def early_kernel(
    q, k_cache, v_cache, out, partial, stats, counters, block_tables, lengths, sinks, k, v, cos, sin,
    sq_h, sq_t, s_block, s_token, s_head, s_table, sk_h, sk_t, sv_h, sv_t, sc_t, ss_t, scale, window, softcap, heads,
    d: tl.constexpr, GROUP: tl.constexpr, GROUP_FEW: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, TURNS: tl.constexpr, ROUND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first tile is on its way before the wait, all but the newest key and value: those alone may be written by
    the kernel ahead. TURNS: queries and the newest key are turned here, and that key and its value are written into
    the cache by the program whose part has them; else k, v, cos and sin are not read."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    first, begin, chunk, used = part_of(length, window, SPLITS, TILE, 1, HAS_WINDOW)
    if split >= used:  # also ahead of the wait: the first part waits, and leaves its place to the next kernel
        return
    start = begin + split * chunk
    end = tl.minimum(start + chunk, length)
    table = block_tables + row * s_table
    place = start + tl.arange(0, TILE)
    base = blocks_of(table, place, length, BLOCK) * s_block + (place % BLOCK) * s_token + kv * s_head
    old = (place >= first) & (place < length - 1)
    keys, values = load_tile(k_cache, v_cache, base, old, d, D)
    newest = tl.load(table + tl.maximum(length - 1, 0) // BLOCK).to(tl.int64)
    newest = newest * s_block + (tl.maximum(length - 1, 0) % BLOCK) * s_token + kv * s_head
    if PDL:
        tl.extra.cuda.gdc_wait()
    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, D)
    head = kv * GROUP + group
    q_mask = (group[:, None] < GROUP) & (dims[None, :] < d)
    source = q + head[:, None] * sq_h + row * sq_t
    own = (k + kv * sk_h + row * sk_t, v + kv * sv_h + row * sv_t, cos + row * sc_t, sin + row * ss_t)
    queries, new_key, new_value = take_new(
        source, q_mask, own, k_cache + newest, v_cache + newest, (end == length) & (length > 0), d, D, TURNS, ROUND
    )
    last = (place == length - 1)[:, None]
    keys = tl.where(last, new_key[None, :], keys)
    values = tl.where(last, new_value[None, :], values)
    best = tl.full([GROUP_PAD], LOWEST, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    result = tl.zeros([GROUP_PAD, D], tl.float32)
    seen = (place >= first) & (place < length)
    scores = tl.where(seen[None, :], logits(queries, keys, scale, softcap, HAS_SOFTCAP), -float("inf"))
    best, total, result = absorb(scores, values, best, total, result)
    for at in range(start + TILE, end, TILE):
        place = at + tl.arange(0, TILE)
        base = blocks_of(table, place, length, BLOCK) * s_block + (place % BLOCK) * s_token + kv * s_head
        keys, values = load_tile(k_cache, v_cache, base, place < end, d, D)
        scores = logits(queries, keys, scale, softcap, HAS_SOFTCAP)  # [group, tile]
        scores = tl.where((place < end)[None, :], scores, -float("inf"))
        best, total, result = absorb(scores, values, best, total, result)
    leave(
        best, total, result, partial, stats, out, counters, sinks, row, kv, split, used, heads,
        d, D, SPLITS, GROUP, GROUP_FEW, GROUP_PAD, HAS_SINKS,
    )  # fmt: skip
