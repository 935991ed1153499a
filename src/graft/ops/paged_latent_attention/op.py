"""graft::paged_latent_attention: writes new latent rows into a paged cache and attends over them."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.ops.call import Call
from graft.ops.paged_latent_attention.reference import paged_latent_attention
from graft.ops.spec import OpSpec, define, native


def fake(
    q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor, latent_cache: Tensor, slot_mapping: Tensor,
    token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor, seq_lens: Tensor, lens_cpu: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    heads = q.shape[1]
    return q.new_empty(q.shape[0], q.shape[2], heads, weight.shape[0] // heads - q.shape[3] + rope.shape[3])


def native_problem(call: Call) -> str | None:
    kind = call.latent_cache.dtype
    return None if kind in (torch.float32, torch.bfloat16, torch.float16) else f"the cache is {kind}"


define(
    OpSpec(
        name="paged_latent_attention",
        schema="(Tensor q, Tensor latent, Tensor rope, Tensor weight, Tensor(a!) latent_cache, Tensor slot_mapping,"
        " Tensor token_to_seq, Tensor block_tables, Tensor cu_seqlens, Tensor seq_lens, Tensor lens_cpu, float scale)"
        " -> Tensor",
        reference=paged_latent_attention,
        fake=fake,
        kernels=(native(native_problem),),
    )
)
