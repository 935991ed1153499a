"""The newest token of a sequence, whose query decodes: from the cache, or turned and written there on the way."""

from __future__ import annotations

import triton
import triton.language as tl

from graft.ops.cached_attention.tiles.triton import capped


@triton.jit
def newest_of(table, length, s_block, s_token, BLOCK: tl.constexpr):
    """Where the first head of the newest token lies in the cache."""
    place = tl.maximum(length - 1, 0)
    return tl.load(table + place // BLOCK).to(tl.int64) * s_block + (place % BLOCK) * s_token


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
    else:
        queries = tl.load(q + dims[None, :], mask=q_mask, other=0.0)
        key = tl.load(key_place + dims, mask=inside, other=0.0)
        value = tl.load(value_place + dims, mask=inside, other=0.0)
    return queries, key, value


@triton.jit
def absorb_newest(queries, key, value, best, total, result, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """The running maximum [m], sum [m] and weighted values [m, d] after one more key and value [d]."""
    product = tl.sum(queries.to(tl.float32) * key.to(tl.float32)[None, :], axis=1)
    score = capped(product, scale, softcap, HAS_SOFTCAP)
    higher = tl.maximum(best, score)
    weight, shrink = tl.exp2(score - higher), tl.exp2(best - higher)
    rounded = weight.to(value.dtype).to(tl.float32)  # as a tile's weights are
    return (
        higher,
        total * shrink + weight,
        result * shrink[:, None] + rounded[:, None] * value.to(tl.float32)[None, :],
    )
