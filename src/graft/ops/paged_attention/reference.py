"""Attention over a paged key-value cache, in plain torch: the new keys and values are written, then all are read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graft.ops.cached_attention.reference import attend
from graft.ops.paged_cache import block_of, raw, write


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, token_to_seq: Tensor,  # noqa: ARG001
    block_tables: Tensor, cu_seqlens: Tensor, seq_lens: Tensor, lens_cpu: Tensor, scale: float,  # noqa: ARG001
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q: [1, h, T, d]; k, v: [1, kv, T, d]; caches (ops/paged_cache.py) are written at their slots → [1, T, h, d]."""
    store(k, v, k_cache, v_cache, slot_mapping)
    return attend(q, k_cache, v_cache, block_tables, seq_lens, lens_cpu, scale, window, softcap, sinks, (k, v))


def store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    clear_new_blocks((k_cache, v_cache), slot_mapping)
    write_cache(k, v, k_cache, v_cache, slot_mapping)


def clear_new_blocks(caches: Sequence[Tensor], slot_mapping: Tensor) -> None:
    """A block whose first place is written is new. What others left in it may be NaN, which a mask does not hide."""
    size = block_of(caches[0])
    new = [slot // size for slot in slot_mapping.tolist() if slot % size == 0]
    if new:
        blocks = torch.tensor(new, device=slot_mapping.device)
        for cache in caches:
            raw(cache).index_fill_(0, blocks, 0)


def write_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Stores the new keys and values at their slots."""
    for new, cache in ((k, k_cache), (v, v_cache)):
        write(cache, slot_mapping, new[0].transpose(0, 1))  # [T, kv, d]
