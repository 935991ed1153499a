"""Attention of absorbed queries over a paged cache of latent rows, split over the context.

A program takes one token, up to 64 of its heads, and one of SPLITS parts of what the token sees; it reads each row
once for all its heads, as their key and, but for the rotated part, as their value. A second kernel puts the parts
together. The products with the weight, before and behind, are torch's. Prompts are computed by the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.latent_attention.reference import absorb, leave, sizes_of
from graft.ops.launch import processors
from graft.ops.paged_cache import write

MOST_HEADS = 64  # of a program: sums of 64 by 512 numbers are half of an SM's registers
TILE = 32  # positions
MOST_SPLITS = 32
PROGRAMS_PER_SM = 2


@triton.jit
def latent_part_kernel(
    q, cache, partial, stats, token_to_seq, block_tables, cu_seqlens, seq_lens, s_table, s_block, s_token, scale,
    heads,
    rank: tl.constexpr, rope: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """partial: [tokens, heads, SPLITS, rank], the weighted rows; stats: [2, tokens, heads, SPLITS], the largest score
    and the sum of weights."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(2)
    sequence = tl.load(token_to_seq + token)
    behind = tl.load(cu_seqlens + sequence + 1) - token  # new tokens of the sequence from this one on
    seen = (tl.load(seq_lens + sequence) - behind + 1).to(tl.int32)
    chunk = tl.cdiv(tl.cdiv(seen, SPLITS), TILE) * TILE
    start = split * chunk
    end = tl.minimum(start + chunk, seen)
    column, turned = tl.arange(0, RANK), tl.arange(0, ROPE)
    source = q + (token * heads + head[:, None]) * (rank + rope)
    known = head[:, None] < heads
    own = tl.load(source + column[None, :], mask=known & (column[None, :] < rank), other=0.0)
    own_rope = tl.load(source + rank + turned[None, :], mask=known & (turned[None, :] < rope), other=0.0)
    best = tl.full([HEADS], -1e38, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([HEADS, RANK], tl.float32)
    for at in range(start, end, TILE):
        position = at + tl.arange(0, TILE)
        inside = position < end
        block = tl.load(block_tables + sequence * s_table + position // BLOCK, mask=inside, other=0).to(tl.int64)
        row = cache + block * s_block + (position % BLOCK) * s_token
        latent = tl.load(row[:, None] + column[None, :], mask=inside[:, None] & (column[None, :] < rank), other=0.0)
        rotated = tl.load(
            row[:, None] + rank + turned[None, :], mask=inside[:, None] & (turned[None, :] < rope), other=0.0
        )
        scores = tl.dot(own, tl.trans(latent), input_precision="ieee")
        scores += tl.dot(own_rope, tl.trans(rotated), input_precision="ieee")
        scores = tl.where(inside[None, :], scores * scale, -float("inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(best - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(latent.dtype), latent, input_precision="ieee")
        best = higher
    place = (token * heads + head) * SPLITS + split
    tl.store(partial + place[:, None] * rank + column[None, :], mixed, mask=known & (column[None, :] < rank))
    tl.store(stats + place, best, mask=head < heads)
    tl.store(stats + tl.num_programs(0).to(tl.int64) * heads * SPLITS + place, total, mask=head < heads)


@triton.jit
def latent_join_kernel(
    partial, stats, out, count, rank: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """One head of one token: the parts, each by its share of the weights. count: heads of all tokens."""
    place = tl.program_id(0).to(tl.int64)
    part, column = tl.arange(0, SPLITS), tl.arange(0, RANK)
    best = tl.load(stats + place * SPLITS + part)
    share = tl.exp(best - tl.max(best, axis=0))  # 0 of a part that saw nothing
    total = tl.sum(share * tl.load(stats + (count + place) * SPLITS + part), axis=0)
    mask = column[None, :] < rank
    mixed = tl.load(partial + (place * SPLITS + part[:, None]) * rank + column[None, :], mask=mask, other=0.0)
    made = tl.sum(mixed * share[:, None], axis=0) / total
    tl.store(out + place * rank + column, made.to(out.dtype.element_ty), mask=column < rank)


def paged_latent_attention_triton(
    q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor, latent_cache: Tensor, slot_mapping: Tensor,
    token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor, seq_lens: Tensor, lens_cpu: Tensor, scale: float,  # noqa: ARG001
    splits: int | None = None,
) -> Tensor:  # fmt: skip
    """Every token is absorbed. splits: a power of two; else from the shapes."""
    write(latent_cache, slot_mapping, torch.cat((latent, rope), dim=-1)[0].transpose(0, 1))
    sizes = sizes_of(q, rope, weight)
    inside = absorb(q[0].transpose(0, 1), weight, sizes)
    tokens, heads, device = inside.shape[0], sizes.heads, q.device
    each = min(MOST_HEADS, max(16, triton.next_power_of_2(heads)))
    groups = triton.cdiv(heads, each)
    splits = splits or split_count(tokens * groups, device)
    partial = torch.empty((tokens, heads, splits, sizes.rank), dtype=torch.float32, device=device)
    stats = torch.empty((2, tokens, heads, splits), dtype=torch.float32, device=device)
    mixed = torch.empty((tokens, heads, sizes.rank), dtype=q.dtype, device=device)
    wide = triton.next_power_of_2(max(sizes.rank, 16))
    latent_part_kernel[(tokens, groups, splits)](
        inside, latent_cache, partial, stats, token_to_seq, block_tables, cu_seqlens, seq_lens,
        block_tables.stride(0), latent_cache.stride(0), latent_cache.stride(1), scale, heads,
        rank=sizes.rank, rope=sizes.rope, HEADS=each, RANK=wide, ROPE=triton.next_power_of_2(max(sizes.rope, 16)),
        BLOCK=latent_cache.shape[1], TILE=TILE, SPLITS=splits,
        num_warps=4 if each * wide <= 16384 else 8, num_stages=2,
    )  # fmt: skip
    latent_join_kernel[(tokens * heads,)](
        partial, stats, mixed, tokens * heads, rank=sizes.rank, RANK=wide, SPLITS=splits
    )
    return leave(mixed, weight, sizes)[None]


def split_count(programs: int, device: torch.device) -> int:
    """Parts of a context, a power of two: as many as give every SM its programs, whatever the lengths are."""
    wanted = PROGRAMS_PER_SM * processors(device) // max(programs, 1)
    return max(1, min(MOST_SPLITS, 1 << max(wanted, 1).bit_length() - 1))
