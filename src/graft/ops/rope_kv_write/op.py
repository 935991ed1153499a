"""graft::rope_kv_write: queries and keys turned (and normed), keys and values written into the paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graft.ops.rope.op import layout_problem
from graft.ops.rope_kv_write.reference import rope_kv_write
from graft.ops.spec import Kernel, OpSpec, define, needs_triton


def fake(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    interleaved: bool = False, q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
    offset: float = 0.0, cast_last: bool = False,
) -> Tensor:  # fmt: skip
    plain = q_norm is None or cast_last
    return q.new_empty(q.shape, dtype=q.dtype if plain else torch.promote_types(q.dtype, q_norm.dtype))


def triton_supports(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    interleaved: bool = False, q_norm: Tensor | None = None, k_norm: Tensor | None = None, *_: object,
) -> str | None:  # fmt: skip
    dtypes = {t.dtype for t in (q, k, v, k_cache, v_cache, q_norm, k_norm) if t is not None}
    if len(dtypes) > 1:
        return f"heads, caches and norms differ in dtype: {', '.join(sorted(map(str, dtypes)))}"
    if k.stride(-1) != 1 or v.stride(-1) != 1 or k_cache.stride(-1) != 1 or k_cache.stride() != v_cache.stride():
        return "keys, values and caches must have unit last stride, and the caches equal strides"
    # a batch whose size is a symbol is one row of packed tokens
    batched = isinstance(cos.shape[0], int) and cos.shape[0] != 1
    if cos.dim() != 4 or batched or cos.shape[1] != 1 or sin.shape != cos.shape:
        return "cos and sin must be [1, 1, T, r], one angle for all heads of a token"
    return layout_problem(q, cos, sin) or needs_triton(q, k, v, cos, sin, k_cache, v_cache, slot_mapping)


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
        kernels=(Kernel("triton", "triton", run_triton, triton_supports),),
    )
)
