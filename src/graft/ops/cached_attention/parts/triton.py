"""A context in parts: how long they are, and how they are put together.

How many parts there are is fixed by the shapes of a call, as a CUDA graph needs it; how long one is follows on the
device from the length, so that a short context leaves parts empty, and those cost next to nothing. The program that
ends last puts the parts together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graft.ops.cached_attention.tiles.triton import LOG2E, LOWEST, load_scales


@triton.jit
def part_of(length, window, SPLITS: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """First place that is seen, where the first part begins, places of a part (LEAST tiles or more), parts that are
    not empty."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    begin = first // TILE * TILE
    chunk = tl.maximum(tl.cdiv(tl.cdiv(length - begin, SPLITS), TILE), LEAST) * TILE
    return first, begin, chunk, tl.maximum(tl.cdiv(length - begin, chunk), 1)


@triton.jit
def load_tile(caches, block, inside, seen, kv, d: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Keys and values [tile, d] at these positions of the cache, 0 where they are not seen, and their scales. Float8
    values come in pairs, [tile, d / 2]: the tokens of a tile are transposed on their way to the tensor cores, 16 bits
    at a time. caches: keys, values, and the strides of a block, a token and a head."""
    k_cache, v_cache, s_block, s_token, s_head = caches
    base = block * s_block + inside * s_token + kv * s_head
    k_scales, v_scales = load_scales(k_cache, v_cache, block, inside, seen, kv, s_block, s_token, BLOCK)
    keys = load_rows(k_cache, base, seen, d, D)
    if v_cache.dtype.element_ty == tl.float8e4nv:
        pairs = v_cache.to(tl.pointer_type(tl.int16), bitcast=True)
        return keys, load_rows(pairs, base // 2, seen, d // 2, D // 2), k_scales, v_scales
    else:
        return keys, load_rows(v_cache, base, seen, d, D), k_scales, v_scales


@triton.jit
def load_columns(caches, block, inside, seen, kv, d: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """As load_tile, with values [d, tile], and float8 keys in pairs too, [tile, d / 2]."""
    k_cache, v_cache, s_block, s_token, s_head = caches
    base = block * s_block + inside * s_token + kv * s_head
    k_scales, v_scales = load_scales(k_cache, v_cache, block, inside, seen, kv, s_block, s_token, BLOCK)
    if v_cache.dtype.element_ty == tl.float8e4nv:
        k_pairs = k_cache.to(tl.pointer_type(tl.int16), bitcast=True)
        v_pairs = v_cache.to(tl.pointer_type(tl.int16), bitcast=True)
        keys = load_rows(k_pairs, base // 2, seen, d // 2, D // 2)
        return keys, load_transposed(v_pairs, base // 2, seen, d // 2, D // 2), k_scales, v_scales
    else:
        keys, values = load_rows(k_cache, base, seen, d, D), load_transposed(v_cache, base, seen, d, D)
        return keys, values, k_scales, v_scales


@triton.jit
def load_transposed(cache, base, seen, d: tl.constexpr, D: tl.constexpr):
    dims = tl.arange(0, D)
    mask = seen[None, :]
    if d < D:
        mask = mask & (dims[:, None] < d)
    return tl.load(cache + base[None, :] + dims[:, None], mask=mask, other=0.0)


@triton.jit
def load_rows(cache, base, seen, d: tl.constexpr, D: tl.constexpr):
    dims = tl.arange(0, D)
    mask = seen[:, None]
    if d < D:
        mask = mask & (dims[None, :] < d)
    return tl.load(cache + base[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def put_together(
    partial, stats, count, head, used, sinks, live, d: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The results [m, D] of heads from their parts, all of which are read at once. Past the L1 cache: another SM
    may have written them just now. head: [m], counted over all sequences."""
    dims = tl.arange(0, D)
    part = tl.arange(0, SPLITS)
    there = live[:, None] & (part < used)[None, :]
    best = tl.load(stats + (head * SPLITS)[:, None] + part, mask=there, other=LOWEST, cache_modifier=".cg")
    highest = tl.max(best, axis=1)
    sink = highest
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
            position = out + flat[:, None] * d + dims[None, :]
            tl.store(position, whole.to(out.dtype.element_ty), mask=(few < GROUP)[:, None] & (dims[None, :] < d))
