"""What the kernels of sequences that decode take alike: tensors, strides and constants of one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from graft.ops.launch import pdl_supported
from graft.ops.paged_cache import block_of
from graft.weights.quantize import FP8


class NewHeads(NamedTuple):
    """What stands between a layer's projections and its attention, as in graft::rope_kv_write. k, v: new keys and
    values [1, kv, n, d]; cos, sin: [1, 1, n, r]."""

    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0
    cast_last: bool = False


@dataclass(frozen=True)
class Turn:
    """The same as a kernel is compiled for it. R: values of a head that rotate; ROUND: products are rounded, as in
    eager."""

    ROTATES: bool
    ROUND: bool = False
    R: int = 0
    INTERLEAVED: bool = False
    NORM_Q: bool = False
    NORM_K: bool = False
    CAST_LAST: bool = False


@dataclass(frozen=True)
class DecodeCall:
    """caches: q, k_cache, v_cache, out, ahead of what a kernel has for itself; others: what follows it. few: queries
    of a group, padded; row: bytes of a key in the queries' dtype; twice: 2 for a float8 cache, of half the bytes."""

    caches: tuple[Tensor, ...]
    others: tuple[Any, ...]
    constants: dict[str, Any]
    kv: int
    few: int
    row: int
    twice: int

    @property
    def out(self) -> Tensor:
        return self.caches[3]


def decode_call(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float,
    window: int | None, softcap: float | None, sinks: Tensor | None, out: Tensor | None,
    rotation: NewHeads | None,
) -> DecodeCall:  # fmt: skip
    """As split_kv (decode/triton.py) is called."""
    _, h, n, d = q.shape
    kv, wide = k_cache.shape[2], max(16, triton.next_power_of_2(d))
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = torch.empty((1, n, h, d), dtype=q.dtype, device=q.device) if out is None else out
    turning = rotation or NewHeads(q, q, q, q)
    k, v, cos, sin, _, q_norm, k_norm, *_ = turning
    strides = [t.stride(i) for t, i in ((k, 1), (k, 2), (v, 1), (v, 2), (cos, 2), (sin, 2))]
    few, pdl = triton.next_power_of_2(h // kv), pdl_supported(q.device)
    others = (
        block_tables, seq_lens, q if sinks is None else sinks, k, v, cos, sin, q if q_norm is None else q_norm,
        q if k_norm is None else k_norm,
        q.stride(1), q.stride(2), *k_cache.stride()[:3], block_tables.stride(0), *strides,
        scale, window or 0, softcap or 1.0, turning.eps, turning.offset,
    )  # fmt: skip
    constants = {
        "d": d, "D": wide, "GROUP": h // kv, "GROUP_FEW": few, "BLOCK": block_of(k_cache),
        "HAS_WINDOW": window is not None, "HAS_SOFTCAP": softcap is not None, "HAS_SINKS": sinks is not None,
        "TURN": Turn(False) if rotation is None else turn_of(q, rotation),
        "WIDE": k_cache.numel() >= 1 << 31, "PDL": pdl, "launch_pdl": pdl,
    }  # fmt: skip
    twice = 1 + (k_cache.dtype is FP8)
    return DecodeCall((q, k_cache, v_cache, out), others, constants, kv, few, wide * q.element_size(), twice)


def turn_of(q: Tensor, rotation: NewHeads) -> Turn:
    """As constants of a kernel: what is absent is equal in all calls."""
    rounds = torch.promote_types(q.dtype, rotation.cos.dtype) == q.dtype
    norms = (rotation.q_norm is not None, rotation.k_norm is not None)
    cast_last = rotation.cast_last and any(norms)
    return Turn(True, rounds, rotation.cos.shape[-1], rotation.interleaved, *norms, cast_last)
