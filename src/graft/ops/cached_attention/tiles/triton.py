"""What the decode and the prefill kernel share: where a tile of keys lies, its scores, and the running softmax.

Exponentials are to base 2: scores carry a factor of log2(e). A row that has seen nothing yet has LOWEST as its
maximum and not -inf, whose difference with itself is no number.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)
# A table grows with the context and the layout is passed in slices: neither may compile a kernel anew in mid-decode.
UNSPECIAL = ["s_table", "window"]
UNALIGNED = ["block_tables", "seq_lens"]


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
def seen_of(position, first, end, HAS_WINDOW: tl.constexpr):
    """Which positions a query sees: from `first` on, if there is a window, and below `end`."""
    seen = position < end
    if HAS_WINDOW:
        seen = seen & (position >= first)
    return seen


@triton.jit
def logits(queries, keys, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """[m, d] x [tile, d] → [m, tile], times log2(e)."""
    return capped(tl.dot(queries, tl.trans(keys), input_precision="ieee"), scale, softcap, HAS_SOFTCAP)


@triton.jit
def capped(scores, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Products of queries and keys scaled, and soft-capped, times log2(e)."""
    if HAS_SOFTCAP:
        twice = scores * (2.0 * scale / softcap)
        return (softcap * LOG2E) * (1.0 - 2.0 / (tl.exp2(twice * LOG2E) + 1.0))  # tanh
    return scores * (scale * LOG2E)


@triton.jit
def absorb(scores, values, best, total, result):
    """The running maximum [m], sum [m] and weighted values [m, d] after one more tile."""
    higher = tl.maximum(best, tl.max(scores, axis=1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(best - higher)
    total = total * shrink + tl.sum(weights, axis=1)
    result = tl.dot(weights.to(values.dtype), values, result * shrink[:, None], input_precision="ieee")
    return higher, total, result
