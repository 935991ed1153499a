"""graft::rope_kv_write: queries and keys rotated (and normed), keys and values written into the paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graft.ops.cached_attention.op import float8_problem, native_problem
from graft.ops.call import Call
from graft.ops.paged_cache import scattered
from graft.ops.rope.op import layout_problem
from graft.ops.rope_kv_write.reference import rope_kv_write
from graft.ops.spec import Kernel, OpSpec, define, native, needs_triton, vector_problem
from graft.weights.quantize import FP8


def fake(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    interleaved: bool = False, q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
    offset: float = 0.0, cast_last: bool = False,
) -> Tensor:  # fmt: skip
    plain = q_norm is None or cast_last
    return q.new_empty(q.shape, dtype=q.dtype if plain else torch.promote_types(q.dtype, q_norm.dtype))


def triton_problem(call: Call) -> str | None:
    return dtype_problem(call) or heads_problem(call)


def dtype_problem(call: Call) -> str | None:
    q, k, v, k_cache, v_cache = call.q, call.k, call.v, call.k_cache, call.v_cache
    caches = {k_cache.dtype, v_cache.dtype} - {FP8}
    dtypes = {t.dtype for t in (q, k, v, call.q_norm, call.k_norm) if t is not None} | caches
    if len(dtypes) > 1 or k_cache.dtype != v_cache.dtype:
        return f"heads, caches and norms differ in dtype: {', '.join(sorted(map(str, dtypes)))}"
    if problem := vector_problem(q.shape[-1], call.q_norm, call.k_norm):
        return problem
    missing = needs_triton(q, k, v, call.cos, call.sin, k_cache, v_cache, call.slot_mapping)
    return missing or float8_problem(k_cache)


def heads_problem(call: Call) -> str | None:
    k, v, k_cache, v_cache, cos, sin = call.k, call.v, call.k_cache, call.v_cache, call.cos, call.sin
    if problem := scattered(k_cache):
        return problem
    if k.stride(-1) != 1 or v.stride(-1) != 1 or k_cache.stride(-1) != 1 or k_cache.stride() != v_cache.stride():
        return "keys, values and caches must have unit last stride, and the caches equal strides"
    # a batch whose size is a symbol is one row of packed tokens
    batched = isinstance(cos.shape[0], int) and cos.shape[0] != 1
    if cos.dim() != 4 or batched or cos.shape[1] != 1 or sin.shape != cos.shape:
        return "cos and sin must be [1, 1, T, r], one angle for all heads of a token"
    return layout_problem(call.q, cos, sin)


def run_triton(*args: Any) -> Tensor:
    from graft.ops.rope_kv_write.triton import rope_kv_write_triton

    return rope_kv_write_triton(*args)


define(
    OpSpec(
        name="rope_kv_write",
        schema="(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache,"
        " Tensor slot_mapping, bool interleaved=False, Tensor? q_norm=None, Tensor? k_norm=None, float eps=0.0,"
        " float offset=0.0, bool cast_last=False) -> Tensor",
        reference=rope_kv_write,
        fake=fake,
        kernels=(Kernel("triton", "triton", triton_problem, run_triton), native(native_problem)),
    )
)
