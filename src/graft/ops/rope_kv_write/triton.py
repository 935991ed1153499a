"""Rotary embedding, optional QK-norm and the write into the paged cache in one kernel.

A program takes some heads of one token: queries, or keys together with their values. Few tokens: one head and one
warp a program, which is the shortest way through; many tokens: eight heads and four warps (8,192 tokens of 8B into a
float8 cache: 59 us, with two 81; into 16 bits 60 and 62).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.cached_attention.float8.triton import divided, larger, scales_for
from graft.ops.cached_attention.tiles.triton import scale_of
from graft.ops.launch import pdl_supported
from graft.ops.paged_cache import block_of
from graft.ops.rope.triton import rotate_pairs
from graft.ops.triton_math import load_wide, normed

FEW = 1024  # heads of all tokens: up to here one head a program, all of them at once (8 programs an SM)


@triton.jit
def turn_heads(
    source, target, scale_at, s_source, s_target, head, heads, cos, sin, weight, eps, offset,
    d: tl.constexpr, r: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, ROUND: tl.constexpr,
    BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, CAST_LAST: tl.constexpr,
):  # fmt: skip
    """The heads `head` [heads, 1] of one token: normed, rotated and stored; in float8 with their scales, which are
    BLOCK apart."""
    dtype = source.dtype.element_ty
    cols = tl.arange(0, HALF)[None, :]
    rotating = cols < r // 2
    mask = (head < heads) & rotating
    if INTERLEAVED:
        one, two = 2 * cols, 2 * cols + 1
    else:
        one, two = cols, r // 2 + cols
    source += head * s_source
    target += head * s_target
    first, second = load_wide(source + one, mask), load_wide(source + two, mask)
    rest = r + tl.arange(0, REST)[None, :]  # none of them below d where the whole head rotates
    passing = rest < d
    tail = load_wide(source + rest, (head < heads) & passing)
    if NORM:
        total = tl.sum(first * first + second * second, axis=1) + tl.sum(tail * tail, axis=1)
        scale = tl.rsqrt(total / d + eps)[:, None]
        first = normed(first, scale, load_wide(weight + one, rotating), offset, dtype, CAST_LAST)
        second = normed(second, scale, load_wide(weight + two, rotating), offset, dtype, CAST_LAST)
        tail = normed(tail, scale, load_wide(weight + rest, passing), offset, dtype, CAST_LAST)
    first, second = rotate_pairs(first, second, cos, sin, one, two, rotating, dtype, ROUND)
    first, second, tail = first.to(dtype), second.to(dtype), tail.to(dtype)
    if target.dtype.element_ty == tl.float8e4nv:
        scales = larger(larger(scales_for(first), scales_for(second)), scales_for(tail))
        first, second = divided(first, scales), divided(second, scales)
        tail = divided(tail, scales)
        tl.store(scale_at + head * BLOCK, scales, mask=head < heads)
    tl.store(target + one, first, mask=mask)
    tl.store(target + two, second, mask=mask)
    tl.store(target + rest, tail, mask=(head < heads) & passing)


@triton.jit
def rope_kv_write_kernel(
    q, k, v, cos, sin, out, k_cache, v_cache, slot_mapping, q_norm, k_norm, eps, offset, h, kv,
    sq_h, sq_t, sk_h, sk_t, sv_h, sv_t, so_h, so_t, sc_t, ss_t, s_block, s_token, s_head,
    d: tl.constexpr, r: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, ROUND: tl.constexpr, INTERLEAVED: tl.constexpr, NORM_Q: tl.constexpr, NORM_K: tl.constexpr,
    CAST_LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if PDL:
        tl.extra.cuda.gdc_wait()
    part = tl.program_id(1)
    parts_q = tl.cdiv(h, HEADS)
    cos += token * sc_t
    sin += token * ss_t
    some = tl.arange(0, HEADS)[:, None]
    if part < parts_q:
        turn_heads(
            q + token * sq_t, out + token * so_t, out, sq_h, so_h, part * HEADS + some, h, cos, sin, q_norm, eps,
            offset, d, r, HALF, REST, ROUND, BLOCK, INTERLEAVED, NORM_Q, CAST_LAST,
        )  # fmt: skip
    else:
        block, inside = slot // BLOCK, slot % BLOCK
        position = block * s_block + inside * s_token
        head = (part - parts_q) * HEADS + some
        cols = tl.arange(0, D)[None, :]
        mask = (head < kv) & (cols < d)
        values = tl.load(v + token * sv_t + head * sv_h + cols, mask=mask, other=0.0)
        k_scale = scale_of(k_cache, block, inside, 0, s_block, s_token, BLOCK)
        turn_heads(
            k + token * sk_t, k_cache + position, k_scale, sk_h, s_head, head, kv, cos, sin, k_norm, eps,
            offset, d, r, HALF, REST, ROUND, BLOCK, INTERLEAVED, NORM_K, CAST_LAST,
        )  # fmt: skip
        if v_cache.dtype.element_ty == tl.float8e4nv:
            scales = scales_for(values)
            v_scale = scale_of(v_cache, block, inside, 0, s_block, s_token, BLOCK)
            tl.store(v_scale + head * BLOCK, scales, mask=head < kv)
            values = divided(values, scales)
        tl.store(v_cache + position + head * s_head + cols, values, mask=mask)


def rope_kv_write_triton(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    interleaved: bool = False, q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
    offset: float = 0.0, cast_last: bool = False,
) -> Tensor:  # fmt: skip
    _, h, tokens, d = q.shape
    kv, r = k.shape[1], cos.shape[-1]
    cos, sin = ((t if t.stride(-1) == 1 else t.contiguous()).expand(1, 1, tokens, r) for t in (cos, sin))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    some = 1 if tokens * (h + kv) <= FEW else min(8, triton.next_power_of_2(kv))
    half = triton.next_power_of_2(r // 2)
    pdl = pdl_supported(q.device)
    rope_kv_write_kernel[(tokens, triton.cdiv(h, some) + triton.cdiv(kv, some))](
        q, k, v, cos, sin, out, k_cache, v_cache, slot_mapping, q if q_norm is None else q_norm,
        k if k_norm is None else k_norm, eps, offset, h, kv,
        q.stride(1), q.stride(2), k.stride(1), k.stride(2), v.stride(1), v.stride(2), out.stride(1), out.stride(2),
        cos.stride(2), sin.stride(2), *k_cache.stride()[:3],
        d=d, r=r, HEADS=some, HALF=half, REST=triton.next_power_of_2(max(d - r, 1)),
        D=triton.next_power_of_2(d), BLOCK=block_of(k_cache),
        ROUND=torch.promote_types(q.dtype, cos.dtype) == q.dtype, INTERLEAVED=interleaved,
        NORM_Q=q_norm is not None, NORM_K=k_norm is not None, CAST_LAST=cast_last, PDL=pdl,
        num_warps=max(1, some * half // 128), launch_pdl=pdl,
    )  # fmt: skip
    return out
