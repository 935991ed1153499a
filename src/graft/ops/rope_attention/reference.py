"""Rotation, write into the paged cache and attention: the references one after the other."""

from __future__ import annotations

from torch import Tensor

from graft.ops.cached_attention.reference import cached_attention
from graft.ops.rope_kv_write.reference import rope_kv_write


def rope_attention(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor, seq_lens: Tensor, lens_cpu: Tensor, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, interleaved: bool = False,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0, offset: float = 0.0,
    cast_last: bool = False,
) -> Tensor:  # fmt: skip
    """As graft::rope_kv_write, then graft::cached_attention → [1, T, h, d]."""
    rotated = rope_kv_write(
        q, k, v, cos, sin, k_cache, v_cache, slot_mapping, interleaved, q_norm, k_norm, eps, offset, cast_last
    )
    return cached_attention(
        rotated, k_cache, v_cache, token_to_seq, block_tables, cu_seqlens, seq_lens, lens_cpu, scale, window, softcap,
        sinks,
    )  # fmt: skip
