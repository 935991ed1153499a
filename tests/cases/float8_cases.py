"""Paged caches in float8: made of others, read as a whole, poisoned where nobody may look."""

from __future__ import annotations

import torch

from graft.ops.paged_cache import block_of, raw, read, rows_of, scales_of, write
from graft.weights.quantize import FP8


def float8_cache(cache):
    """[blocks, block, kv, d] in float32 → the same in float8."""
    blocks, block, kv, d = cache.shape
    made = torch.zeros((blocks, rows_of(block, d, FP8), kv, d), dtype=torch.uint8, device=cache.device).view(FP8)
    write(made, torch.arange(blocks * block, device=cache.device), cache.flatten(0, 1))
    return made


def everything(cache, dtype=torch.float32):
    """All tokens of a cache, [blocks, block, kv, d]."""
    return read(cache, torch.arange(cache.shape[0], device=cache.device), dtype)


def poison(caches, tables, lengths):
    """NaN, as number and as scale, wherever there is no token of a sequence."""
    owned = torch.zeros(caches[0].shape[0], block_of(caches[0]), dtype=torch.bool, device=caches[0].device)
    for table, length in zip(tables.tolist(), lengths.tolist(), strict=True):
        for position in range(length):
            owned[table[position // 16], position % 16] = True
    for cache in caches:
        raw(cache)[:, :16][~owned] = 0x7F
        scales_of(cache).transpose(1, 2)[~owned] = torch.nan
