"""The new keys and values into the paged cache, then cached_attention's kernels over it."""

from __future__ import annotations

from torch import Tensor

from graft.ops.cached_attention.op import run_sdpa, sdpa_supports
from graft.ops.cached_attention.triton import cached_attention_triton
from graft.ops.paged_attention.reference import write_cache


def paged_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor,
    slots: Tensor, rows: Tensor, block_tables: Tensor, starts: Tensor, lengths: Tensor, spans: Tensor,
    scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    write_cache(k, v, k_cache, v_cache, slots)
    given = (q, k_cache, v_cache, rows, block_tables, starts, lengths, spans, scale, window, softcap, sinks)
    decode = q.shape[2] == lengths.shape[0]
    return cached_attention_triton(*given) if decode or sdpa_supports(*given) is not None else run_sdpa(*given)
