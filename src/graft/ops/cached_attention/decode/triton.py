"""Attention of one new token a sequence over a paged cache (flash-decoding).

A program takes one sequence, one key-value head with all queries of its group, and one of SPLITS parts of the
context. How many parts there are is fixed by the shapes, as a CUDA graph needs it; how long one is follows on the
device from the length, so that a short context leaves parts empty, and those cost next to nothing. The program that
ends last puts the parts together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.cached_attention.tiles.triton import LOG2E, LOWEST, UNALIGNED, UNSPECIAL, absorb, blocks_of, logits
from graft.ops.launch import LAYOUT_SETTLED, counters, pdl_supported

PROGRAMS_PER_SM = 1  # a program of few sequences takes an SM's registers for itself
MOST_SPLITS = 64
TILE_BYTES = 16384  # of keys, and as much of values, in each round of the loop


@triton.jit
def part_of(
    length, window, SPLITS: tl.constexpr, FIRST: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr
):  # fmt: skip
    """First place that is seen, where the first part begins, places of a part, parts that are not empty."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    begin = first // TILE * TILE
    chunk = tl.maximum(tl.cdiv(tl.cdiv(length - begin, SPLITS), TILE) * TILE, FIRST)
    return first, begin, chunk, tl.maximum(tl.cdiv(length - begin, chunk), 1)


@triton.jit
def put_together(
    partial, stats, count, head, used, sinks, live, d: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The results [m, D] of heads from their parts, all of which are read at once. Past the first cache: another SM
    may have written them just now. head: [m], counted over all sequences."""
    dims = tl.arange(0, D)
    part = tl.arange(0, SPLITS)
    there = live[:, None] & (part < used)[None, :]
    best = tl.load(stats + (head * SPLITS)[:, None] + part, mask=there, other=LOWEST, cache_modifier=".cg")
    highest = tl.max(best, axis=1)
    if HAS_SINKS:
        sink = tl.load(sinks, mask=live, other=0.0).to(tl.float32) * LOG2E
        highest = tl.maximum(highest, sink)
    totals = tl.load(stats + count + (head * SPLITS)[:, None] + part, mask=there, other=0.0, cache_modifier=".cg")
    whole = tl.sum(totals * tl.exp2(best - highest[:, None]), axis=1)
    if HAS_SINKS:
        whole += tl.exp2(sink - highest)
    result = tl.zeros([head.shape[0], D], tl.float32)
    for other in tl.static_range(SPLITS):
        mask = live & (other < used)
        weight = tl.exp2(
            tl.load(stats + head * SPLITS + other, mask=mask, other=LOWEST, cache_modifier=".cg") - highest
        )
        where = partial + (head * SPLITS + other)[:, None] * d + dims[None, :]
        values = tl.load(where, mask=mask[:, None] & (dims[None, :] < d), other=0.0, cache_modifier=".cg")
        result += values * weight[:, None]
    return result / tl.where(whole > 0, whole, 1.0)[:, None]


@triton.jit
def only_part(best, total, result, sinks, live, HAS_SINKS: tl.constexpr):
    """The result [m, d] of heads whose context is one part."""
    if HAS_SINKS:
        sink = tl.load(sinks, mask=live, other=0.0).to(tl.float32) * LOG2E
        highest = tl.maximum(best, sink)
        total = total * tl.exp2(best - highest) + tl.exp2(sink - highest)
        result = result * tl.exp2(best - highest)[:, None]
    return result / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def leave(
    best, total, result, partial, stats, out, counters, sinks, row, kv, split, used, heads,
    d: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, GROUP_FEW: tl.constexpr,
    GROUP_PAD: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Stores the result of the only part, or one part of several, and then, if it is the last, what they make."""
    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, D)
    head = kv * GROUP + group
    inside = (group[:, None] < GROUP) & (dims[None, :] < d)
    if used == 1:
        result = only_part(best, total, result, sinks + head, group < GROUP, HAS_SINKS)
        target = out + (row * heads + head)[:, None] * d + dims[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=inside)
    elif SPLITS > 1:
        count = tl.num_programs(0) * heads * SPLITS
        slot = (row * heads + head) * SPLITS + split
        tl.store(partial + slot[:, None] * d + dims[None, :], result, mask=inside)
        tl.store(stats + slot, best, mask=group < GROUP)
        tl.store(stats + count + slot, total, mask=group < GROUP)
        counter = counters + row * tl.num_programs(1) + kv
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
            tl.atomic_xchg(counter, 0)  # for the next call
            few = tl.arange(0, GROUP_FEW)
            flat = row * heads + kv * GROUP + few
            own = sinks + kv * GROUP + few
            whole = put_together(partial, stats, count, flat, used, own, few < GROUP, d, D, SPLITS, HAS_SINKS)
            place = out + flat[:, None] * d + dims[None, :]
            tl.store(place, whole.to(out.dtype.element_ty), mask=(few < GROUP)[:, None] & (dims[None, :] < d))


@triton.jit
def load_tile(k_cache, v_cache, base, seen, d: tl.constexpr, D: tl.constexpr):
    """Keys and values [tile, d] at these places of the cache; 0 where they are not seen."""
    dims = tl.arange(0, D)
    mask = seen[:, None] & (dims[None, :] < d)
    at = base[:, None] + dims[None, :]
    return tl.load(k_cache + at, mask=mask, other=0.0), tl.load(v_cache + at, mask=mask, other=0.0)


@triton.jit(do_not_specialize=UNSPECIAL, do_not_specialize_on_alignment=UNALIGNED)
def split_kv_kernel(
    q, k_cache, v_cache, out, partial, stats, counters, block_tables, lengths, sinks,
    sq_h, sq_t, s_block, s_token, s_head, s_table, scale, window, softcap, heads,
    d: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    GROUP_FEW: tl.constexpr, FIRST: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """EARLY: the first FIRST places of the part are on their way before the wait, all but the newest: that one alone
    may be written by the kernel ahead. The rest of the part comes tile by tile."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not EARLY:
            tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    first, begin, chunk, used = part_of(length, window, SPLITS, FIRST, TILE, HAS_WINDOW)
    if split >= used:  # also ahead of the wait: the first part waits, and leaves its place to the next kernel
        return
    start = begin + split * chunk
    end = tl.minimum(start + chunk, length)
    table = block_tables + row * s_table
    place = start + tl.arange(0, FIRST)
    base = blocks_of(table, place, length, BLOCK) * s_block + (place % BLOCK) * s_token + kv * s_head
    old = (place >= first) & (place < length - 1)
    keys, values = load_tile(k_cache, v_cache, base, old, d, D)
    newest = tl.load(table + tl.maximum(length - 1, 0) // BLOCK).to(tl.int64)
    newest = newest * s_block + (tl.maximum(length - 1, 0) % BLOCK) * s_token + kv * s_head
    if PDL and EARLY:
        tl.extra.cuda.gdc_wait()
    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, D)
    head = kv * GROUP + group
    q_mask = (group[:, None] < GROUP) & (dims[None, :] < d)
    queries = tl.load(q + head[:, None] * sq_h + row * sq_t + dims[None, :], mask=q_mask, other=0.0)  # [group, d]
    new_key = tl.load(k_cache + newest + dims, mask=dims < d, other=0.0)
    new_value = tl.load(v_cache + newest + dims, mask=dims < d, other=0.0)
    last = (place == length - 1)[:, None]
    keys = tl.where(last, new_key[None, :], keys)
    values = tl.where(last, new_value[None, :], values)
    best = tl.full([GROUP_PAD], LOWEST, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    result = tl.zeros([GROUP_PAD, D], tl.float32)
    seen = (place >= first) & (place < end)
    scores = tl.where(seen[None, :], logits(queries, keys, scale, softcap, HAS_SOFTCAP), -float("inf"))
    best, total, result = absorb(scores, values, best, total, result)
    # a tile ahead: keys are not asked for through two waits
    block = blocks_of(table, start + FIRST + tl.arange(0, TILE), end, BLOCK)
    for at in range(start + FIRST, end, TILE):
        spot = at + tl.arange(0, TILE)
        there = block * s_block + (spot % BLOCK) * s_token + kv * s_head
        block = blocks_of(table, spot + TILE, end, BLOCK)
        more_keys, more_values = load_tile(k_cache, v_cache, there, spot < end, d, D)
        more = logits(queries, more_keys, scale, softcap, HAS_SOFTCAP)  # [group, tile]
        more = tl.where((spot < end)[None, :], more, -float("inf"))
        best, total, result = absorb(more, more_values, best, total, result)
    leave(
        best, total, result, partial, stats, out, counters, sinks, row, kv, split, used, heads,
        d, D, SPLITS, GROUP, GROUP_FEW, GROUP_PAD, HAS_SINKS,
    )  # fmt: skip


def split_kv(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, lengths: Tensor, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    out: Tensor | None = None, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """q: [1, h, n, d], one token of each of n sequences → [1, n, h, d]."""
    _, h, n, d = q.shape
    kv = k_cache.shape[2]
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = torch.empty((1, n, h, d), dtype=q.dtype, device=q.device) if out is None else out
    splits = split_count(n, kv, q.device) if splits is None else splits
    partial = torch.empty((n, h, splits, d) if splits > 1 else (1,), dtype=torch.float32, device=q.device)
    stats = torch.empty((2, n, h, splits) if splits > 1 else (1,), dtype=torch.float32, device=q.device)
    wide = max(16, triton.next_power_of_2(d))
    tile = max(16, min(64, TILE_BYTES // (wide * q.element_size())))
    pdl = pdl_supported(q.device)
    size = size_of(splits, tile)
    split_kv_kernel[(n, kv, splits)](
        q, k_cache, v_cache, out, partial, stats, counters(n * kv if splits > 1 else 1, q.device),
        block_tables, lengths, q if sinks is None else sinks,
        q.stride(1), q.stride(2), *k_cache.stride()[:3], block_tables.stride(0),
        scale, window or 0, softcap or 1.0, h, d=d, D=wide, FIRST=size.first, TILE=tile, SPLITS=splits,
        GROUP=h // kv, GROUP_FEW=triton.next_power_of_2(h // kv), GROUP_PAD=max(16, triton.next_power_of_2(h // kv)),
        BLOCK=k_cache.shape[1], HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None, PDL=pdl, EARLY=LAYOUT_SETTLED,
        num_warps=size.warps, num_stages=size.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class Size:
    first: int  # places that are on their way before the wait
    warps: int
    stages: int  # tiles of the loop on their way


FEW = Size(4, 8, 2)  # in tiles of 64 places: few programs, so what counts is how soon the first places are there
MANY = Size(1, 4, 4)  # many programs, so what counts is how much is on its way at any time


def size_of(splits: int, tile: int) -> Size:
    size = FEW if splits > 1 else MANY
    return replace(size, first=size.first * tile)


def split_count(n: int, kv: int, device: torch.device) -> int:
    """Parts of the context: as many, a power of two, as give every SM its programs, whatever the lengths are."""
    wanted = PROGRAMS_PER_SM * processors(device) // (n * kv)
    return max(1, min(MOST_SPLITS, 1 << max(wanted, 1).bit_length() - 1))


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
