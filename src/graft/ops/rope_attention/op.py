"""graft::rope_attention: queries and keys rotated, keys and values written into the cache, attention over it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graft.ops.cached_attention.op import decode_problem, native_problem, triton_problem
from graft.ops.call import Call
from graft.ops.rope_attention.reference import rope_attention
from graft.ops.rope_kv_write.op import dtype_problem, heads_problem
from graft.ops.spec import Kernel, OpSpec, define, native


def fake(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor, seq_lens: Tensor, lens_cpu: Tensor, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, interleaved: bool = False,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0, offset: float = 0.0,
    cast_last: bool = False,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v_cache.shape[3])


def steps_problem(call: Call) -> str | None:
    """Two kernels, one after the other."""
    return dtype_problem(call)


def whole_problem(call: Call) -> str | None:
    """One kernel, for sequences that decode."""
    return triton_problem(call) or dtype_problem(call)


def whole_call_problem(call: Call) -> str | None:
    return decode_problem(call) or heads_problem(call)


def run_whole(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor, seq_lens: Tensor, lens_cpu: Tensor, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, *how: Any,
) -> Tensor:  # fmt: skip
    from graft.ops.cached_attention.decode.triton import split_kv
    from graft.ops.cached_attention.decode_call import NewHeads

    cos, sin = ((t if t.stride(-1) == 1 else t.contiguous()).expand(1, 1, q.shape[2], -1) for t in (cos, sin))
    rotation = NewHeads(k, v, cos, sin, *how)
    return split_kv(q, k_cache, v_cache, block_tables, seq_lens, scale, window, softcap, sinks, rotation=rotation)


def run_steps(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor, seq_lens: Tensor, lens_cpu: Tensor, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, interleaved: bool = False,
    *norms: Any,
) -> Tensor:  # fmt: skip
    rotated = torch.ops.graft.rope_kv_write(q, k, v, cos, sin, k_cache, v_cache, slot_mapping, interleaved, *norms)
    batch = (token_to_seq, block_tables, cu_seqlens, seq_lens, lens_cpu)
    return torch.ops.graft.cached_attention(rotated, k_cache, v_cache, *batch, scale, window, softcap, sinks)


define(
    OpSpec(
        name="rope_attention",
        schema="(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache,"
        " Tensor slot_mapping, Tensor token_to_seq, Tensor block_tables, Tensor cu_seqlens, Tensor seq_lens,"
        " Tensor lens_cpu, float scale, int? window=None, float? softcap=None, Tensor? sinks=None,"
        " bool interleaved=False, Tensor? q_norm=None, Tensor? k_norm=None, float eps=0.0, float offset=0.0,"
        " bool cast_last=False) -> Tensor",
        reference=rope_attention,
        fake=fake,
        kernels=(
            Kernel("whole", "triton", whole_problem, run_whole, varies=whole_call_problem),
            Kernel("steps", "triton", steps_problem, run_steps, varies=heads_problem),
            native(native_problem),
        ),
    )
)
