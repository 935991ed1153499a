"""Attention of one new token a sequence, for many sequences: the tiles of all contexts shared out evenly.

    contexts, one behind another   |--- 0 ---|-- 1 --|------- 2 -------|- 3 -|…
    shares                         |  a   |  b   |  c   |  d   |  e   |…

A program for each sequence and key-value head leaves the device with its last ones: 448 sequences of 8 heads are 3.02
times what runs at once, so that a quarter of the time is for few. Here a share has as many tiles as every other, the
end of one context and the beginning of the next, and a program for each key-value head; together they are as many as
run at once. A context that lies in several shares is put together by the program that ends last.

The heads of a share read the same tokens at the same time, and those lie beside each other: programs with a head of
their own each would have eight times as many pages of memory open.

In a captured step with prompts in it only the device knows how many sequences decode: they are counted there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.cached_attention.decode_call import NewHeads, decode_call
from graft.ops.cached_attention.newest.triton import (
    absorb_newest,
    keep_new,
    load_new,
    newest_of,
    own_of,
    take_queries,
)
from graft.ops.cached_attention.parts.triton import load_columns, only_part
from graft.ops.cached_attention.tiles.triton import (
    LOWEST,
    UNALIGNED,
    UNSPECIAL,
    absorb_columns,
    blocks_of,
    inside_blocks,
    no_columns,
    operand,
    query_pairs,
    seen_of,
    settled_columns,
)
from graft.ops.launch import counters, processors

STAGES = 3
WARPS = 8  # of an SM, two for each of its schedulers: with 7 or 11 the schedulers that have more end last
REGISTERS = 248  # of a thread; eight warps leave 256
SM_SHARED = 227 * 1024
SCRATCH = 4096  # bytes of a program beside its tiles
# Tiles that a context costs beside its own: its queries come, its result goes. 3.5 us for a row of padding, which has
# one token, while a tile takes 2.2: without this 64 of them behind 448 sequences of 2,900 took 1,072 us and not 684.
BESIDE = tl.constexpr(1)
TILE = 16  # keys, twice as many in float8
FEW_ROWS, MOST_ROWS = 128, 1024  # sequences: every program adds up the tiles of all; a kernel for each number


@triton.jit
def context_of(seq_lens, row, window, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Length, first position that is seen, where the first tile begins, and tiles; of rows alike. Each has one."""
    length = tl.load(seq_lens + row).to(tl.int32)
    first = tl.zeros_like(length)
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    begin = first // TILE * TILE
    return length, first, begin, tl.maximum(tl.cdiv(length - begin, TILE), 1)


@triton.jit
def tile_counts(
    seq_lens, cu_seqlens, rows, window, ROWS_PAD: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """How many sequences there are, and the tiles that each costs, [ROWS_PAD]. COUNTED: of `rows` those at the front
    that bring one token each."""
    every = tl.arange(0, ROWS_PAD)
    if COUNTED:
        ends = tl.load(cu_seqlens + 1 + every, mask=every < rows, other=0).to(tl.int32)
        rows = tl.min(tl.where((every < rows) & (ends != every + 1), every, rows))
    _, _, _, each = context_of(seq_lens, tl.maximum(tl.minimum(every, rows - 1), 0), window, TILE, HAS_WINDOW)
    return rows, tl.where(every < rows, each + BESIDE, 0)


@triton.jit
def first_of(share, shares, tiles):
    """The first tile of a share. 64 bits: tiles of all contexts times shares."""
    return (share.to(tl.int64) * tiles // shares).to(tl.int32)


@triton.jit
def owner_of(tile, shares, tiles):
    """The share that a tile is in."""
    return (tl.cdiv((tile.to(tl.int64) + 1) * shares, tiles) - 1).to(tl.int32)


@triton.jit
def slot_of(share, later, kv, KV: tl.constexpr):
    """Where a share leaves what it has of a context: of the one that it begins with, or of a later one."""
    return (2 * share + later.to(tl.int32)) * KV + kv


@triton.jit
def put_shares_together(
    partial, stats, first, last, behind, kv, sinks, live, d: tl.constexpr, D: tl.constexpr, KV: tl.constexpr,
    GROUP_FEW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The result [group, D] of a context in the shares first … last: of the first what it ended with, if it began
    with something else (behind), of the others what they began with. Past the L1 cache: another SM may have written
    it just now."""
    dims, few = tl.arange(0, D), tl.arange(0, GROUP_FEW)
    best = tl.full([GROUP_FEW], LOWEST, tl.float32)
    total = tl.zeros([GROUP_FEW], tl.float32)
    result = tl.zeros([GROUP_FEW, D], tl.float32)
    for share in range(first, last + 1):
        slot = slot_of(share, behind & (share == first), kv, KV) * GROUP_FEW + few
        own = tl.load(stats + 2 * slot, mask=live, other=LOWEST, cache_modifier=".cg")
        sums = tl.load(stats + 2 * slot + 1, mask=live, other=0.0, cache_modifier=".cg")
        at = partial + slot[:, None] * d + dims[None, :]
        values = tl.load(at, mask=live[:, None] & (dims[None, :] < d), other=0.0, cache_modifier=".cg")
        higher = tl.maximum(best, own)
        shrink, weight = tl.exp2(best - higher), tl.exp2(own - higher)
        best, total = higher, total * shrink + sums * weight
        result = result * shrink[:, None] + values * weight[:, None]
    return only_part(best, total, result, sinks, live, HAS_SINKS)


@triton.jit
def attend(
    queries, new, own, newest, caches, table, low, high, length, first, kv, scale, softcap, d: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    TURN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The running maximum [m], sum [m] and weighted values [m, d] over the positions low … high of one context."""
    block = blocks_of(table, low + tl.arange(0, TILE), length, BLOCK, WIDE)
    best = tl.full([queries.shape[0]], LOWEST, tl.float32)
    total = tl.zeros([queries.shape[0]], tl.float32)
    result, second = no_columns(caches[1], queries.shape[0], D)
    pairs = query_pairs(queries, caches[0])
    for at in range(low, tl.minimum(high, length - 1), TILE):
        position = at + tl.arange(0, TILE)
        seen = seen_of(position, first, length - 1, HAS_WINDOW)
        inside = inside_blocks(at, BLOCK, TILE)
        # a tile ahead: keys are not asked for through two waits
        following = blocks_of(table, position + TILE, length, BLOCK, WIDE)
        keys, values, k_scales, v_scales = load_columns(caches, block, inside, seen, kv, d, D, BLOCK)
        block = following
        best, total, result, second = absorb_columns(
            pairs, keys, values, k_scales, v_scales, seen, best, total, result, second, scale, softcap, HAS_SOFTCAP
        )
    result = settled_columns(result, second, caches[1])
    if (high == length) & (length > 0):  # the newest token is among them
        key, value = keep_new(new, own, newest, d, D, TURN)
        best, total, result = absorb_newest(queries, key, value, best, total, result, scale, softcap, HAS_SOFTCAP)
    return best, total, result


@triton.jit
def leave_share(
    best, total, result, partial, stats, out, counter, sinks, share, shares, tiles, began, context, own_tiles, kv,
    flat, d: tl.constexpr, D: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, GROUP_FEW: tl.constexpr,
    GROUP_PAD: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Stores what a share has of a context, and then, if it is the last, what the shares make. context: its first
    tile, in the order of all; flat: its first head."""
    group, few, dims = tl.arange(0, GROUP_PAD), tl.arange(0, GROUP_FEW), tl.arange(0, D)
    slot = slot_of(share, began < context - BESIDE, kv, KV) * GROUP_FEW + group
    inside = (group[:, None] < GROUP) & (dims[None, :] < d)
    tl.store(partial + slot[:, None] * d + dims[None, :], result, mask=inside)
    tl.store(stats + 2 * slot, best, mask=group < GROUP)
    tl.store(stats + 2 * slot + 1, total, mask=group < GROUP)
    first = owner_of(context, shares, tiles)
    last = owner_of(context + own_tiles - 1, shares, tiles)
    tl.debug_barrier()  # all threads have stored before one of them says so
    if tl.atomic_add(counter, 1, sem="acq_rel") == last - first:
        tl.atomic_xchg(counter, 0)  # for the next call
        behind = first_of(first, shares, tiles) < context - BESIDE
        live = few < GROUP
        whole = put_shares_together(
            partial, stats, first, last, behind, kv, sinks + few, live, d, D, KV, GROUP_FEW, HAS_SINKS
        )
        position = out + (flat + few)[:, None] * d + dims[None, :]
        tl.store(position, whole.to(out.dtype.element_ty), mask=live[:, None] & (dims[None, :] < d))


@triton.jit(do_not_specialize=[*UNSPECIAL, "rows"], do_not_specialize_on_alignment=[*UNALIGNED, "cu_seqlens"])
def balanced_kernel(
    q, k_cache, v_cache, out, partial, stats, counters, block_tables, seq_lens, sinks, k, v, cos, sin, q_norm, k_norm,
    sq_h, sq_t, s_block, s_token, s_head, s_table, sk_h, sk_t, sv_h, sv_t, sc_t, ss_t, scale, window, softcap, eps,
    offset, rows, cu_seqlens,
    d: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, GROUP_FEW: tl.constexpr, GROUP_PAD: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS_PAD: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, TURN: tl.constexpr, WIDE: tl.constexpr, COUNTED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """TURN: as in the early kernel."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    rows, counts = tile_counts(seq_lens, cu_seqlens, rows, window, ROWS_PAD, TILE, HAS_WINDOW, COUNTED)
    tiles = tl.sum(counts)
    kv, share = tl.program_id(0) % KV, tl.program_id(0) // KV
    shares = tl.minimum(tl.num_programs(0) // KV, tiles)
    if share >= shares:
        return
    at, end = first_of(share, shares, tiles), first_of(share + 1, shares, tiles)
    began, ends = at, tl.cumsum(counts)
    row = tl.sum((ends <= at).to(tl.int64))
    context = tl.sum(tl.where(ends <= at, counts, 0)) + BESIDE  # its first tile, in the order of all
    length, first, begin, own_tiles = context_of(seq_lens, row, window, TILE, HAS_WINDOW)
    group, dims = tl.arange(0, GROUP_PAD), tl.arange(0, D)
    q_mask = (group[:, None] < GROUP) & (dims[None, :] < d)
    caches = (k_cache, v_cache, s_block, s_token, s_head)
    if PDL:
        tl.extra.cuda.gdc_wait()
    while tl.maximum(at, context) < end:
        at, stop = tl.maximum(at, context), tl.minimum(end, context + own_tiles)
        low = begin + (at - context) * TILE
        high = tl.minimum(low + (stop - at) * TILE, length)
        table = block_tables + row * s_table
        newest = newest_of(caches, table, length, kv, BLOCK)
        source = q + (kv * GROUP + group)[:, None] * sq_h + row * sq_t
        own = own_of(k, v, cos, sin, q_norm, k_norm, eps, offset, (sk_h, sk_t, sv_h, sv_t, sc_t, ss_t), kv, row)
        queries = operand(take_queries(source, q_mask, own, d, D, TURN), k_cache)
        new = load_new(own, newest, d, D, TURN)
        best, total, result = attend(
            queries, new, own, newest, caches, table, low, high, length, first, kv, scale, softcap,
            d, D, BLOCK, TILE, HAS_WINDOW, HAS_SOFTCAP, TURN, WIDE,
        )  # fmt: skip
        flat = (row * KV + kv) * GROUP
        if stop - at == own_tiles:
            whole = only_part(best, total, result, sinks + kv * GROUP + group, group < GROUP, HAS_SINKS)
            tl.store(out + (flat + group)[:, None] * d + dims[None, :], whole.to(out.dtype.element_ty), mask=q_mask)
        else:
            leave_share(
                best, total, result, partial, stats, out, counters + row * KV + kv, sinks + kv * GROUP,
                share, shares, tiles, began, context, own_tiles, kv, flat,
                d, D, KV, GROUP, GROUP_FEW, GROUP_PAD, HAS_SINKS,
            )  # fmt: skip
        at = stop
        if stop == context + own_tiles:
            row, context = row + 1, stop + BESIDE
            length, first, begin, own_tiles = context_of(
                seq_lens, tl.minimum(row, rows - 1), window, TILE, HAS_WINDOW
            )


def balanced(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    out: Tensor | None = None, rotation: NewHeads | None = None,
    programs: int | None = None, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As split_kv (decode/triton.py). programs: else as many as run at once. cu_seqlens: some sequences, behind the
    others, bring more than a token or none, and their rows of `out` stay as they are."""
    call = decode_call(
        q, k_cache, v_cache, block_tables, seq_lens, scale, window, softcap, sinks, out, rotation
    )  # fmt: skip
    n, kv, few, d = q.shape[2], call.kv, call.few, q.shape[3]
    tile, warps, at_once = sizes_for(call.row, call.twice)
    shares = max((programs or at_once * processors(q.device)) // kv, 1)
    partial = torch.empty((2 * shares, kv, few, d), dtype=torch.float32, device=q.device)
    stats = torch.empty((2 * shares, kv, few, 2), dtype=torch.float32, device=q.device)
    balanced_kernel[(shares * kv,)](
        *call.caches, partial, stats, counters(n * kv, q.device), *call.others, n,
        seq_lens if cu_seqlens is None else cu_seqlens, KV=kv, TILE=tile,
        ROWS_PAD=FEW_ROWS if n <= FEW_ROWS else MOST_ROWS, GROUP_PAD=max(8, few), COUNTED=cu_seqlens is not None,
        **call.constants,
        num_warps=warps, num_stages=STAGES, maxnreg=REGISTERS,
    )  # fmt: skip
    return call.out


def sizes_for(row: int, twice: int) -> tuple[int, int, int]:
    """Positions of a tile, warps of a program, programs that an SM has room for at once. row: bytes of a key, two for
    float8; twice: 2 for float8, of half the bytes."""
    warps = 1 if row <= 256 else 2
    tiles = 2 * (STAGES - 1) * TILE * row  # keys and values, in two buffers
    return twice * TILE, warps, min(WARPS // warps, SM_SHARED // (tiles + SCRATCH))
