"""Attention over a paged cache, one program a token and key-value head: all queries of the group share the keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.paged_attention.reference import write_cache


@triton.jit
def paged_attention_kernel(
    q, k_cache, v_cache, out, rows, block_tables, starts, lengths, sinks,
    sq_h, sq_t, sk_block, sk_token, sk_head, s_table, scale, window, softcap, heads, d,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    row = tl.load(rows + token)
    length = tl.load(lengths + row)
    position = length - (tl.load(starts + row + 1) - token)  # this token's place in its sequence
    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, D)
    head = kv * GROUP + group
    q_mask = (group[:, None] < GROUP) & (dims[None, :] < d)
    queries = tl.load(q + head[:, None] * sq_h + token * sq_t + dims[None, :], mask=q_mask, other=0.0)  # [group, d]

    first = 0
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0)
    best = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    if HAS_SINKS:
        best = tl.load(sinks + head, mask=group < GROUP, other=0.0).to(tl.float32)
        total += 1.0
    result = tl.zeros([GROUP_PAD, D], tl.float32)
    for start in range(first // TILE * TILE, position + 1, TILE):
        place = start + tl.arange(0, TILE)
        seen = (place <= position) & (place >= first)
        block = tl.load(block_tables + row * s_table + place // BLOCK, mask=seen, other=0).to(tl.int64)
        base = block * sk_block + (place % BLOCK) * sk_token + kv * sk_head
        kv_mask = seen[:, None] & (dims[None, :] < d)
        keys = tl.load(k_cache + base[:, None] + dims[None, :], mask=kv_mask, other=0.0)  # [tile, d]
        values = tl.load(v_cache + base[:, None] + dims[None, :], mask=kv_mask, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale  # [group, tile]
        if HAS_SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(best - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        result = result * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        best = higher
    result = result / total[:, None]
    target = out + token * heads * d + head[:, None] * d + dims[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=q_mask)


def paged_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor,
    slots: Tensor, rows: Tensor, block_tables: Tensor, starts: Tensor, lengths: Tensor,
    scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    write_cache(k, v, k_cache, v_cache, slots)
    _, h, tokens, d = q.shape
    kv = k_cache.shape[2]
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = torch.empty((1, tokens, h, d), dtype=q.dtype, device=q.device)
    group = h // kv
    paged_attention_kernel[(tokens, kv)](
        q, k_cache, v_cache, out, rows, block_tables, starts, lengths, sinks if sinks is not None else q,
        q.stride(1), q.stride(2), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_tables.stride(0),
        scale, window or 0, softcap or 1.0, h, d,
        GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), D=max(16, triton.next_power_of_2(d)),
        BLOCK=k_cache.shape[1], TILE=64,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
    )  # fmt: skip
    return out
