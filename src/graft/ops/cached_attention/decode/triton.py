"""Attention of one new token a sequence over a paged cache (flash-decoding).

A program takes one sequence, one key-value head with all queries of its group, and one of SPLITS parts of the
context, tile by tile with several on their way. Few sequences of up to EARLY_CONTEXT tokens have a kernel of their
own (early), and so have many with longer contexts (balanced).

What a kernel takes of an SM's shared memory is missing in its L1 cache, for the GEMMs behind it as well: they
start while it runs, and the SM keeps its division. At one token a step these read their input again for every row of
the weight, so that attention with 72 KB a program cost the gate-up GEMM of an 8B model 11 us a layer, more than
attention took itself. Hence small tiles where sequences are few.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.cached_attention.balanced.triton import MOST_ROWS, balanced
from graft.ops.cached_attention.decode_call import NewHeads, decode_call
from graft.ops.cached_attention.early.triton import early_kernel
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
from graft.ops.launch import counters, processors
from graft.ops.paged_cache import block_of

PROGRAMS_PER_SM = 2  # a program keeps two tiles of keys and values on their way; two fill an SM's share of bandwidth
FEW_PROGRAMS = 16  # sequences times key-value heads: with so few, a lean kernel
LEAN_PER_SM = 4  # of its programs, which keep one small tile on its way
MOST_SPLITS = 64
LEAST_TILES = 4  # of a part: one program reads 128 or 256 positions sooner than four put their parts together
TILE_BYTES = 16384  # of keys, and as much of values
MANY_PROGRAMS = 256  # sequences times key-value heads: with more, small tiles and few warps, so that all run at once
# With so many a warp each: eleven programs share the registers of an SM and not five (8B, 950 sequences of 192 tokens
# in float8: 196 -> 159 us, 900 of 1,500: 786 -> 736; bfloat16: 247 -> 220, 1,281 -> 1,268). 64 of 4,096 lose by it.
MOST_PROGRAMS = 1024
# From here on all contexts are shared out evenly (8B, µs a layer, float8 and bfloat16: 83 of 21,000 1,092 -> 882 and
# 1,777 -> 1,583, 448 of 3,000 763 -> 701 and 1,278 -> 1,250, 16 of 8,192 109 -> 85 and 161 -> 140). Short ones lose
# 2 to 4 by it: 64 of 192 17 -> 19 and 20 -> 22.
EVEN_PROGRAMS, EVEN_CONTEXT = 64, 2048
EARLY_CONTEXT = 2048  # tokens that the block tables have room for
EARLY_TILE = 256
EARLY_BYTES = 32768  # of keys, and as much of values, in registers
# Programs an SM if every context filled its table; with more, tile by tile is sooner through. 8B, 8 sequences of 160,
# 512, 1,024 and 2,000 tokens: early 9.8, 8.5, 15.8 and 30.4 us a layer, the other 9.4, 11.4, 16.4 and 23.9.
EARLY_PER_SM = 8
# Warps of its programs. With more programs than SMs eight hold so many registers that few programs run at once: 8B, 4
# sequences as above 7.9, 6.5, 11.8, 22.3 us with eight, 8.4, 5.9, 8.5, 15.9 with four. One of 160 6.7 and 7.4.
EARLY_WARPS, MANY_EARLY_WARPS = 8, 4


@triton.jit(do_not_specialize=UNSPECIAL, do_not_specialize_on_alignment=UNALIGNED)
def split_kv_kernel(
    q, k_cache, v_cache, out, partial, stats, counters, block_tables, seq_lens, sinks, k, v, cos, sin, q_norm, k_norm,
    sq_h, sq_t, s_block, s_token, s_head, s_table, sk_h, sk_t, sv_h, sv_t, sc_t, ss_t, scale, window, softcap, eps,
    offset, heads,
    d: tl.constexpr, GROUP: tl.constexpr, GROUP_FEW: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, TURN: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """TURN: as in the early kernel."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seq_lens + row).to(tl.int32)
    first, begin, chunk, used = part_of(length, window, SPLITS, TILE, LEAST, HAS_WINDOW)
    if split >= used:  # also ahead of the wait: the first part waits, and leaves its place to the next kernel
        return
    start = begin + split * chunk
    end = tl.minimum(start + chunk, length)
    table = block_tables + row * s_table
    caches = (k_cache, v_cache, s_block, s_token, s_head)
    block = blocks_of(table, start + tl.arange(0, TILE), length, BLOCK, WIDE)
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
    for at in range(start, tl.minimum(end, length - 1), TILE):
        position = at + tl.arange(0, TILE)
        seen = seen_of(position, first, length - 1, HAS_WINDOW)
        inside = inside_blocks(at, BLOCK, TILE)
        # a tile ahead: keys are not asked for through two waits
        following = blocks_of(table, position + TILE, length, BLOCK, WIDE)
        keys, values, k_scales, v_scales = load_tile(caches, block, inside, seen, kv, d, D, BLOCK)
        block = following
        scores = logits(queries, keys, k_scales, scale, softcap, HAS_SOFTCAP)  # [group, tile]
        scores = tl.where(seen[None, :], scores, -float("inf"))
        best, total, result, second = absorb(scores, values, v_scales, best, total, result, second, queries.dtype)
    result = settled(result, second, v_cache)
    if here:
        key, value = keep_new(new, own, newest, d, D, TURN)
        best, total, result = absorb_newest(queries, key, value, best, total, result, scale, softcap, HAS_SOFTCAP)
    leave(
        best, total, result, partial, stats, out, counters, sinks, row, kv, split, used, heads,
        d, D, SPLITS, GROUP, GROUP_FEW, GROUP_PAD, HAS_SINKS,
    )  # fmt: skip


def split_kv(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    out: Tensor | None = None, splits: int | None = None, early: bool | None = None,
    even: bool | None = None,
    rotation: NewHeads | None = None,
) -> Tensor:  # fmt: skip
    """q: [1, h, n, d], one token of each of n sequences → [1, n, h, d]. splits, early, even: else from the shapes.
    With `splits` the tiles are those of more than FEW_PROGRAMS, so that few sequences have one variant.

    rotation: queries and keys are normed and rotated and the cache is written on the way; else that has been done.
    even: all contexts shared out evenly (balanced).
    """
    _, h, n, d = q.shape
    kv, room = k_cache.shape[2], block_tables.shape[1] * block_of(k_cache)
    if even is None:
        even = splits is None and early is None and is_even(n, kv, room)
    if even:
        options = (window, softcap, sinks, out, rotation)
        return balanced(q, k_cache, v_cache, block_tables, seq_lens, scale, *options)
    call = decode_call(
        q, k_cache, v_cache, block_tables, seq_lens, scale, window, softcap, sinks, out, rotation
    )  # fmt: skip
    tile, parts = early_parts(call.row, room)
    early = is_early(n * kv * parts, room, q.device) if early is None else early
    if early:
        splits = splits or min(parts, MOST_SPLITS)
        built: dict[str, Any] = {"num_warps": early_warps(n * kv * splits, q.device), "num_stages": 1}
    else:
        programs = n * kv if splits is None else max(n * kv, FEW_PROGRAMS + 1)
        tile, built = tiles_for(programs, call.row, call.twice)
        splits = splits or split_count(n, kv, q.device)
    partial = torch.empty((n, h, splits, d) if splits > 1 else (1,), dtype=torch.float32, device=q.device)
    stats = torch.empty((2, n, h, splits) if splits > 1 else (1,), dtype=torch.float32, device=q.device)
    (early_kernel if early else split_kv_kernel)[(n, kv, splits)](
        *call.caches, partial, stats, counters(n * kv if splits > 1 else 1, q.device), *call.others, h,
        TILE=tile, SPLITS=splits, GROUP_PAD=max(16, call.few), **call.constants, **built,
    )  # fmt: skip
    return call.out


def tiles_for(programs: int, row: int, twice: int) -> tuple[int, dict[str, Any]]:
    """Positions of a tile, and how the kernel is built. row: bytes of a key, two for float8; twice: 2 for float8, of
    half the bytes, so that as many are on their way."""
    few, many, most = programs <= FEW_PROGRAMS, programs > MANY_PROGRAMS, programs >= MOST_PROGRAMS
    positions = 16 if most else 32 if few or many else 64
    tile = max(16, min(twice * positions, twice * TILE_BYTES // row))
    warps = 1 if most and row <= 256 else 2 if many else 4
    return tile, {"LEAST": LEAST_TILES // twice, "num_warps": warps, "num_stages": 2 if few else 3}


def is_even(n: int, kv: int, room: int) -> bool:
    """Whether so many sequences with tables for `room` tokens are shared out evenly."""
    return n * kv >= EVEN_PROGRAMS and room > EVEN_CONTEXT and n <= MOST_ROWS


def early_parts(row: int, room: int) -> tuple[int, int]:
    """Positions of the early kernel's one tile, and into how many parts they divide tables for `room` tokens."""
    tile = max(16, min(EARLY_TILE, EARLY_BYTES // row))
    return tile, triton.next_power_of_2(-(-room // tile))


def is_early(programs: int, room: int, device: torch.device) -> bool:
    """Whether so many programs, each with a part of a table for `room` tokens, take the early kernel."""
    return programs <= EARLY_PER_SM * processors(device) and room <= EARLY_CONTEXT


def early_warps(programs: int, device: torch.device) -> int:
    return EARLY_WARPS if programs <= processors(device) else MANY_EARLY_WARPS


def split_count(n: int, kv: int, device: torch.device) -> int:
    """Parts of the context: as many, a power of two, as give every SM its programs, whatever the lengths are."""
    each = LEAN_PER_SM if n * kv <= FEW_PROGRAMS else PROGRAMS_PER_SM
    wanted = each * processors(device) // (n * kv)
    return max(1, min(MOST_SPLITS, 1 << max(wanted, 1).bit_length() - 1))
