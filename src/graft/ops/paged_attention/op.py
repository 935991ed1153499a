"""graft::paged_attention: writes new keys and values into a paged cache and attends over it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graft.ops.cached_attention.op import float8_problem, native_problem
from graft.ops.call import Call
from graft.ops.paged_attention.reference import paged_attention
from graft.ops.spec import Kernel, OpSpec, define, native, needs_triton
from graft.weights.quantize import FP8


def fake(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, token_to_seq: Tensor,
    block_tables: Tensor, cu_seqlens: Tensor, seq_lens: Tensor, lens_cpu: Tensor, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def triton_problem(call: Call) -> str | None:
    q, k, v, k_cache, v_cache = call.q, call.k, call.v, call.k_cache, call.v_cache
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (q.dtype, FP8):
        return f"queries are {q.dtype} and the cache is {k_cache.dtype}"
    if k.shape[-1] != v.shape[-1]:
        return "keys and values differ in head size"
    return needs_triton(q, k, v, k_cache, v_cache) or float8_problem(k_cache)


def run_triton(*args: Any) -> Tensor:
    from graft.ops.paged_attention.triton import paged_attention_triton

    return paged_attention_triton(*args)


define(
    OpSpec(
        name="paged_attention",
        schema="(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping,"
        " Tensor token_to_seq, Tensor block_tables, Tensor cu_seqlens, Tensor seq_lens, Tensor lens_cpu, float scale,"
        " int? window=None, float? softcap=None, Tensor? sinks=None) -> Tensor",
        reference=paged_attention,
        fake=fake,
        kernels=(Kernel("triton", "triton", triton_problem, run_triton), native(native_problem)),
    )
)
