"""The newest token of a sequence, whose query decodes: from the cache, or rotated and written there on the way."""

from __future__ import annotations

import triton
import triton.language as tl

from graft.ops.cached_attention.float8.triton import divided, scales_for
from graft.ops.cached_attention.tiles.triton import capped, scale_of
from graft.ops.triton_math import normed, rounded


@triton.jit
def newest_of(caches, table, length, kv, BLOCK: tl.constexpr):
    """Where a head of the newest token lies: its key, its value, and their scales in a float8 cache."""
    k_cache, v_cache, s_block, s_token, s_head = caches
    position = tl.maximum(length - 1, 0)
    block, inside = tl.load(table + position // BLOCK).to(tl.int64), position % BLOCK
    at = block * s_block + inside * s_token + kv * s_head
    k_scale = scale_of(k_cache, block, inside, kv, s_block, s_token, BLOCK)
    return k_cache + at, v_cache + at, k_scale, scale_of(v_cache, block, inside, kv, s_block, s_token, BLOCK)


@triton.jit
def own_of(k, v, cos, sin, q_norm, k_norm, eps, offset, strides, kv, row):
    """Of one sequence and one key-value head, where its new key and value and its angles lie, and the norms."""
    sk_h, sk_t, sv_h, sv_t, sc_t, ss_t = strides
    k, v = k + kv * sk_h + row * sk_t, v + kv * sv_h + row * sv_t
    return k, v, cos + row * sc_t, sin + row * ss_t, q_norm, k_norm, eps, offset


@triton.jit
def load_head(x, cos, sin, norm, dims, mask, d: tl.constexpr, TURN: tl.constexpr, NORM: tl.constexpr):
    """What `rotate` needs of heads at x + dims: their values, those that they are paired with (i and i + r / 2, or i
    and i + 1), the cosines and the sines, and a norm's weights of both."""
    if TURN.INTERLEAVED:
        pair = dims ^ 1
    else:
        pair = tl.where(dims < TURN.R // 2, dims + TURN.R // 2, dims - TURN.R // 2)
    turning = dims < TURN.R
    if d > TURN.R:
        pair = tl.where(turning, pair, dims)
    own, other = tl.load(x + dims, mask=mask, other=0.0), tl.load(x + pair, mask=mask, other=0.0)
    cosines, sines = tl.load(cos + dims, mask=turning, other=0.0), tl.load(sin + dims, mask=turning, other=0.0)
    if NORM:
        inside = dims < d
        weights = tl.load(norm + dims, mask=inside, other=0.0), tl.load(norm + pair, mask=inside, other=0.0)
    else:
        weights = own, own
    return own, other, cosines, sines, weights[0], weights[1]


@triton.jit
def rotate(head, dims, eps, offset, d: tl.constexpr, dtype: tl.constexpr, TURN: tl.constexpr, NORM: tl.constexpr):
    """Heads after their norm and their rotation, each rounded as in eager."""
    x, y = head[0].to(tl.float32), head[1].to(tl.float32)
    if NORM:
        square = tl.sum(x * x, axis=len(x.shape) - 1, keep_dims=True)
        scale = tl.rsqrt(square / d + eps)
        x = normed(x, scale, head[4].to(tl.float32), offset, dtype, TURN.CAST_LAST)
        y = normed(y, scale, head[5].to(tl.float32), offset, dtype, TURN.CAST_LAST)
    first = dims % 2 == 0 if TURN.INTERLEAVED else dims < TURN.R // 2
    a = x * head[2].to(tl.float32)
    b = tl.where(first, -y, y) * head[3].to(tl.float32)
    if TURN.ROUND:
        a, b = rounded(a, dtype), rounded(b, dtype)
    turned = (a + b).to(dtype)
    if d > TURN.R:
        turned = tl.where(dims < TURN.R, turned, x.to(dtype))
    return turned


@triton.jit
def take_queries(q, q_mask, own, d: tl.constexpr, D: tl.constexpr, TURN: tl.constexpr):
    """Queries [group, d], normed and rotated if they are not yet. own: of own_of."""
    dims = tl.arange(0, D)[None, :]
    if TURN.ROTATES:
        head = load_head(q, own[2], own[3], own[4], dims, q_mask, d, TURN, TURN.NORM_Q)
        return rotate(head, dims, own[6], own[7], d, q.dtype.element_ty, TURN, TURN.NORM_Q)
    else:
        return tl.load(q + dims, mask=q_mask, other=0.0)


@triton.jit
def load_new(own, newest, d: tl.constexpr, D: tl.constexpr, TURN: tl.constexpr):
    """The newest key and value [d] as they lie in memory, and their scales: nothing is computed yet, so that nothing
    waits for them."""
    dims = tl.arange(0, D)
    if TURN.ROTATES:
        value = tl.load(own[1] + dims, mask=dims < d, other=0.0)
        head = load_head(own[0], own[2], own[3], own[5], dims, dims < d, d, TURN, TURN.NORM_K)
        return head, value, 1.0, 1.0
    else:
        key = tl.load(newest[0] + dims, mask=dims < d, other=0.0)
        value = tl.load(newest[1] + dims, mask=dims < d, other=0.0)
        if key.dtype == tl.float8e4nv:
            return (key, key, key, key, key, key), value, tl.load(newest[2]), tl.load(newest[3])
        else:
            return (key, key, key, key, key, key), value, 1.0, 1.0


@triton.jit
def keep_scaled(head, position, scale, d: tl.constexpr, D: tl.constexpr):
    """A head [d] rounded to float8 and written with its scale → as it is read from then on."""
    dims = tl.arange(0, D)[None, :]
    scales = scales_for(head[None, :])
    rounded = divided(head[None, :], scales)
    tl.store(position + dims, rounded, mask=dims < d)
    tl.store(scale + tl.zeros([1, 1], tl.int32), scales)
    return tl.reshape(rounded.to(tl.float32) * scales, [D])


@triton.jit
def keep_new(new, own, newest, d: tl.constexpr, D: tl.constexpr, TURN: tl.constexpr):
    """The newest key and value [d], normed, rotated and written into the cache if they are not there yet."""
    FLOAT8: tl.constexpr = newest[0].dtype.element_ty == tl.float8e4nv
    key, value = new[0][0], new[1]
    if TURN.ROTATES:
        dims = tl.arange(0, D)
        key = rotate(new[0], dims, own[6], own[7], d, key.dtype, TURN, TURN.NORM_K)
        if FLOAT8:
            key = keep_scaled(key, newest[0], newest[2], d, D)
            value = keep_scaled(value, newest[1], newest[3], d, D)
        else:
            tl.store(newest[0] + dims, key, mask=dims < d)
            tl.store(newest[1] + dims, value, mask=dims < d)
    elif FLOAT8:
        key, value = key.to(tl.float32) * new[2], value.to(tl.float32) * new[3]
    return key, value


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
