"""The new keys and values into the paged cache, then cached_attention's kernels over it."""

from __future__ import annotations

from torch import Tensor

from graft.ops.cached_attention.op import run_sdpa, sdpa_supports
from graft.ops.cached_attention.triton import cached_attention_triton
from graft.ops.paged_attention.reference import write_cache


def paged_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, token_to_seq: Tensor,
    block_tables: Tensor, cu_seqlens: Tensor, seq_lens: Tensor, lens_cpu: Tensor, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    write_cache(k, v, k_cache, v_cache, slot_mapping)
    layout = (token_to_seq, block_tables, cu_seqlens, seq_lens, lens_cpu)
    given = (q, k_cache, v_cache, *layout, scale, window, softcap, sinks)
    decode = q.shape[2] == seq_lens.shape[0]
    return cached_attention_triton(*given) if decode or sdpa_supports(*given) is not None else run_sdpa(*given)
