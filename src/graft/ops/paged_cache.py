"""The blocks of the paged cache: keys, or values, of one layer, [blocks, rows, kv_heads, head_dim].

A block has a row for each of its tokens. In float8 (e4m3) every head of a token has a scale of its own, float32, with
which its largest magnitude is 448; the scales lie behind the tokens of their block, as [kv_heads, tokens], in as many
more rows as they need: one for blocks of 16 tokens and heads of 64 and more. So whoever copies, clears or shares a
block has its scales with it.

Against one scale for all (vLLM's default, 1.0): on SmolLM2-135M logits are 1.8e-2 from those of float64, not 2.5e-2,
and the divergence is 4.6e-3 nats, not 8.0e-3 (benchmarks/kv_cache_error.py); no outlier leaves the range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graft.weights.quantize import FP8, rows_to_fp8

SCALE = torch.float32


def rows_of(block: int, head_dim: int, dtype: torch.dtype) -> int:
    """Rows of a block of so many tokens."""
    return block + (-(-block * SCALE.itemsize // head_dim) if dtype is FP8 else 0)


def block_of(cache: Tensor) -> int:
    """Tokens of a block."""
    rows, head_dim = cache.shape[1], cache.shape[3]
    return rows * head_dim // (head_dim + SCALE.itemsize) if cache.dtype is FP8 else rows


def scales_of(cache: Tensor) -> Tensor:
    """Of a float8 cache: [blocks, kv_heads, tokens], a view."""
    blocks, _, kv, _ = cache.shape
    block = block_of(cache)
    behind = cache[:, block:].view(blocks, -1).view(SCALE)
    return behind[:, : kv * block].view(blocks, kv, block)


def scattered(cache: Tensor) -> str | None:
    """Why kernels, which find the scales behind the rows, cannot take this cache, or None."""
    if cache.dtype is FP8 and not cache.is_contiguous():
        return "a float8 cache must be contiguous: scales lie behind its rows"
    return None


def raw(cache: Tensor) -> Tensor:
    """The same memory in a dtype that can be indexed, filled and copied on every device."""
    return cache.view(torch.uint8) if cache.dtype is FP8 else cache


def write(cache: Tensor, slots: Tensor, heads: Tensor) -> None:
    """Stores heads [T, kv, d] at slots [T] (slot = block * tokens of a block + position in the block)."""
    if cache.dtype is not FP8:
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, heads)
        return
    size = block_of(cache)
    blocks, inside = slots // size, slots % size
    codes, scales = rows_to_fp8(heads.float())
    raw(cache)[blocks, inside] = raw(codes)
    scales_of(cache)[blocks, :, inside] = scales


def read(cache: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """The tokens of these blocks [n] → [n, tokens of a block, kv, d]; those of a float8 cache in `dtype`."""
    if cache.dtype is not FP8:
        return cache.index_select(0, blocks)
    codes = raw(cache).index_select(0, blocks).view(FP8)[:, : block_of(cache)]
    scales = scales_of(cache).index_select(0, blocks).transpose(1, 2)
    wide = torch.promote_types(dtype, SCALE)
    return (codes.to(wide) * scales[..., None]).to(dtype)
