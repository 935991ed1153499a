"""What the decode and the prefill kernel share: where a tile of keys lies, its scores, and the running softmax.

Exponentials are to base 2: scores carry a factor of log2(e). A row that has seen nothing yet has LOWEST as its
maximum and not -inf, whose difference with itself is no number.

Of a float8 cache (ops/paged_cache.py) every key and value has a scale. Tiles become float16 on their way to the
tensor cores, which is exact and one conversion for two numbers; to bfloat16 it is five. So queries of 16 bits are
float16 as well (one above 65,504 makes an infinity, which the engine tells). Where queries are few, scores are
multiplied by the scales of the keys and weights by those of the values, an eighth of the multiplications that the
tiles would take; where they are many, the tiles are (`widened`): as many, and each thread loads two scales instead
of sixteen. Numbers below 6e-5 would lose digits in float16, hence factors: UNIT until `settled`, WIDENED (keys and
values up to 4,094).
"""

from __future__ import annotations

import triton
import triton.language as tl

from graft.ops.triton_math import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)
# A table grows with the context and the layout is passed in slices: neither may compile a kernel anew in mid-decode.
UNSPECIAL = ["s_table", "window"]
UNALIGNED = ["block_tables", "seq_lens"]
UNIT = tl.constexpr(256.0)
WIDENED = tl.constexpr(16.0)


@triton.jit
def blocks_of(table, position, end, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """The blocks of the cache that hold the positions [tile] of a sequence, where those are below `end`. WIDE: a
    position in the cache may need more than 32 bits; fewer save a quarter of a tile's instructions."""
    return tl.load(table + position // BLOCK, mask=position < end, other=0).to(tl.int64 if WIDE else tl.int32)


@triton.jit
def inside_blocks(at, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Where in their blocks the positions [tile] from `at` on lie, a multiple of TILE: the same for every tile if no
    block is cut."""
    position = tl.arange(0, TILE)
    if TILE % BLOCK != 0:
        position += at
    return position % BLOCK


@triton.jit
def scale_of(cache, block, inside, kv, s_block, s_token, BLOCK: tl.constexpr):
    """Where the scales of a head's tokens are: [kv, BLOCK] behind the rows of a float8 block."""
    behind = (cache + block * s_block + BLOCK * s_token).to(tl.pointer_type(tl.float32), bitcast=True)
    return behind + kv * BLOCK + inside


@triton.jit
def load_scales(k_cache, v_cache, block, inside, seen, kv, s_block, s_token, BLOCK: tl.constexpr):
    """Those of a tile's keys and values [tile] each; 1 where the cache is not float8."""
    if k_cache.dtype.element_ty == tl.float8e4nv:
        keys = tl.load(scale_of(k_cache, block, inside, kv, s_block, s_token, BLOCK), mask=seen, other=0.0)
        return keys, tl.load(scale_of(v_cache, block, inside, kv, s_block, s_token, BLOCK), mask=seen, other=0.0)
    else:
        return 1.0, 1.0


@triton.jit
def operand(x, cache):
    """Queries as they are multiplied with this cache's keys."""
    if cache.dtype.element_ty == tl.float8e4nv and x.dtype != tl.float32:
        return x.to(tl.float16)
    else:
        return x


@triton.jit
def pairs_of(values, dtype: tl.constexpr):
    """Float8 values in pairs, [tile, d / 2] int16 → the first of each pair, and the second. Triton's own conversion
    takes them apart one by one, 1,001 instructions for a tile of 64 tokens and not 771."""
    if INTERPRETED:
        first = (values & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        second = ((values >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        first, second = tl.inline_asm_elementwise(
            """{ .reg .b32 sorted; .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high; }""",
            "=r,=r,r", [values], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return first.to(dtype), second.to(dtype)


@triton.jit
def query_pairs(queries, cache):
    """Queries [m, d] as `pairs_of` splits the keys of a float8 cache, [m, d / 2] each; others as they are."""
    if cache.dtype.element_ty == tl.float8e4nv:
        return tl.split(tl.reshape(queries, [queries.shape[0], queries.shape[1] // 2, 2]))
    else:
        return queries, queries


@triton.jit
def widened(tile, scales, dtype: tl.constexpr):
    """Float8 keys or values [tile, d] with their scales, WIDENED times as large; others as they are."""
    if tile.dtype == tl.float8e4nv:
        return tile.to(dtype) * (scales * WIDENED).to(dtype)[:, None]
    else:
        return tile


@triton.jit
def no_values(cache, ROWS: tl.constexpr, D: tl.constexpr):
    """The weighted values before the first tile; of values in pairs those of the first and of the second of each."""
    if cache.dtype.element_ty == tl.float8e4nv:
        return tl.zeros([ROWS, D // 2], tl.float32), tl.zeros([ROWS, D // 2], tl.float32)
    else:
        return tl.zeros([ROWS, D], tl.float32), 0.0


@triton.jit
def settled(result, second, cache):
    """Weighted values [m, d] in order, without the factor that tiles of a float8 cache bring."""
    if cache.dtype.element_ty == tl.float8e4nv:
        return tl.interleave(result, second) * (1.0 / UNIT)
    else:
        return result


@triton.jit
def seen_of(position, first, end, HAS_WINDOW: tl.constexpr):
    """Which positions a query sees: from `first` on, if there is a window, and below `end`."""
    seen = position < end
    if HAS_WINDOW:
        seen = seen & (position >= first)
    return seen


@triton.jit
def logits(queries, keys, scales, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """[m, d] x [tile, d] → [m, tile], times log2(e). scales: of the keys."""
    scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
    if keys.dtype == tl.float8e4nv:
        scores *= scales[None, :]
    return capped(scores, scale, softcap, HAS_SOFTCAP)


@triton.jit
def capped(scores, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Products of queries and keys scaled, and soft-capped, times log2(e)."""
    if HAS_SOFTCAP:
        twice = scores * (2.0 * scale / softcap)
        return (softcap * LOG2E) * (1.0 - 2.0 / (tl.exp2(twice * LOG2E) + 1.0))  # tanh
    return scores * (scale * LOG2E)


@triton.jit
def absorb(scores, values, scales, best, total, result, second, dtype: tl.constexpr):
    """The running maximum [m], sum [m] and weighted values [m, d] after one more tile. scales: of the values;
    dtype: of the queries, in which they are multiplied."""
    higher = tl.maximum(best, tl.max(scores, axis=1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(best - higher)
    total = total * shrink + tl.sum(weights, axis=1)
    result *= shrink[:, None]
    if values.dtype == tl.int16:
        weights = (weights * (scales * UNIT)[None, :]).to(dtype)
        first, other = pairs_of(values, dtype)
        result = tl.dot(weights, first, result, input_precision="ieee")
        second = tl.dot(weights, other, second * shrink[:, None], input_precision="ieee")
    else:
        result = tl.dot(weights.to(dtype), values.to(dtype), result, input_precision="ieee")
    return higher, total, result, second


@triton.jit
def no_columns(cache, COLUMNS: tl.constexpr, D: tl.constexpr):
    """As no_values, a column a query."""
    if cache.dtype.element_ty == tl.float8e4nv:
        return tl.zeros([D // 2, COLUMNS], tl.float32), tl.zeros([D // 2, COLUMNS], tl.float32)
    else:
        return tl.zeros([D, COLUMNS], tl.float32), 0.0


@triton.jit
def settled_columns(result, second, cache):
    """As settled: [d, m] → [m, d]."""
    if cache.dtype.element_ty == tl.float8e4nv:
        return settled(tl.trans(result), tl.trans(second), cache)
    else:
        return tl.trans(result)


@triton.jit
def absorb_columns(
    queries, keys, values, k_scales, v_scales, seen, best, total, result, second, scale, softcap,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """As logits and absorb, for few queries: keys and values are the left operand, 16 rows of a tensor core, and
    queries the right one, 8 columns, where a group of 4 would fill a quarter of 16 rows. queries: query_pairs; keys
    and values: load_columns."""
    dtype: tl.constexpr = queries[0].dtype
    if keys.dtype == tl.int16:
        first, other = pairs_of(keys, dtype)
        scores = tl.dot(first, tl.trans(queries[0]), input_precision="ieee")
        scores = tl.dot(other, tl.trans(queries[1]), scores, input_precision="ieee") * k_scales[:, None]
    else:
        scores = tl.dot(keys, tl.trans(queries[0]), input_precision="ieee")
    scores = tl.where(seen[:, None], capped(scores, scale, softcap, HAS_SOFTCAP), -float("inf"))
    higher = tl.maximum(best, tl.max(scores, axis=0))
    weights = tl.exp2(scores - higher[None, :])
    shrink = tl.exp2(best - higher)
    total = total * shrink + tl.sum(weights, axis=0)
    result *= shrink[None, :]
    if values.dtype == tl.int16:
        weights = (weights * (v_scales * UNIT)[:, None]).to(dtype)
        first, other = pairs_of(values, dtype)
        result = tl.dot(first, weights, result, input_precision="ieee")
        second = tl.dot(other, weights, second * shrink[None, :], input_precision="ieee")
    else:
        result = tl.dot(values, weights.to(dtype), result, input_precision="ieee")
    return higher, total, result, second
