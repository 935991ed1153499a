"""The new keys and values into the paged cache, then cached_attention's kernels over it."""

from __future__ import annotations

from torch import Tensor

from graft.ops.cached_attention.op import SPEC
from graft.ops.paged_attention.reference import write_cache
from graft.ops.selection import choose


def paged_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor,
    slot_mapping: Tensor, token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor, seq_lens: Tensor,
    lens_cpu: Tensor, scale: float, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    write_cache(k, v, k_cache, v_cache, slot_mapping)
    batch = (token_to_seq, block_tables, cu_seqlens, seq_lens, lens_cpu)
    given = (q, k_cache, v_cache, *batch, scale, window, softcap, sinks)
    return choose(SPEC, SPEC.call(*given)).run(*given)
