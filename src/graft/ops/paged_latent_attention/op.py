"""graft::paged_latent_attention: writes new latent rows into a paged cache and attends over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graft.ops.call import Call
from graft.ops.launch import capturing
from graft.ops.paged_latent_attention.reference import paged_latent_attention
from graft.ops.spec import Kernel, OpSpec, define, native, needs_triton


def fake(
    q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor, latent_cache: Tensor, slot_mapping: Tensor,
    token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor, seq_lens: Tensor, lens_cpu: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    heads = q.shape[1]
    return q.new_empty(q.shape[0], q.shape[2], heads, weight.shape[0] // heads - q.shape[3] + rope.shape[3])


def native_problem(call: Call) -> str | None:
    kind = call.latent_cache.dtype
    return None if kind in (torch.float32, torch.bfloat16, torch.float16) else f"the cache is {kind}"


def triton_problem(call: Call) -> str | None:
    q, cache = call.q, call.latent_cache
    if cache.dtype != q.dtype or q.dtype is torch.float64:
        return f"queries are {q.dtype} and the cache is {cache.dtype}; it takes 16 and 32 bits, both alike"
    return needs_triton(q, call.weight, cache)


def prompts_problem(call: Call) -> str | None:
    """Where the sizes of a step are not fixed, prompts expand keys and values."""
    one_each = call.q.shape[2] == call.seq_lens.shape[0]
    return None if one_each or capturing(call.q) else "prompts are quicker with keys and values of their own"


def run_triton(*args: Any) -> Tensor:
    from graft.ops.paged_latent_attention.triton import paged_latent_attention_triton

    return paged_latent_attention_triton(*args)


define(
    OpSpec(
        name="paged_latent_attention",
        schema="(Tensor q, Tensor latent, Tensor rope, Tensor weight, Tensor(a!) latent_cache, Tensor slot_mapping,"
        " Tensor token_to_seq, Tensor block_tables, Tensor cu_seqlens, Tensor seq_lens, Tensor lens_cpu, float scale)"
        " -> Tensor",
        reference=paged_latent_attention,
        fake=fake,
        kernels=(
            Kernel("triton", "triton", triton_problem, run_triton, varies=prompts_problem),
            native(native_problem),
        ),
    )
)
