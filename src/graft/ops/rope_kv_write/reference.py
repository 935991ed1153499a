"""Rotary embedding of queries and keys and the write into the paged cache: the references one after the other."""

from __future__ import annotations

from torch import Tensor

from graft.ops.paged_attention.reference import store
from graft.ops.rms_norm.reference import rms_norm
from graft.ops.rope.reference import rope


def rope_kv_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    interleaved: bool = False, q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
    offset: float = 0.0, cast_last: bool = False,
) -> Tensor:  # fmt: skip
    """q: [1, h, T, d]; k, v: [1, kv, T, d]; cos, sin as graft::rope takes them; caches: [blocks, block, kv, d].

    q_norm, k_norm: [d], weights of an RMSNorm of every head before it rotates (QK-norm). The rotated keys and the
    values are written at slot_mapping [T] (block * block_size + position in the block); the rotated queries are
    returned.
    """
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps, offset, cast_last)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps, offset, cast_last)
    store(rope(k, cos, sin, interleaved), v, k_cache, v_cache, slot_mapping)
    return rope(q, cos, sin, interleaved)
