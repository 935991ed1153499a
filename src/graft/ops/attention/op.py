"""graft::attention: what Hugging Face's attention hook, and spelled-out attention, become in a captured graph."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.ops.attention.reference import attention, attention_sdpa
from graft.ops.call import Call
from graft.ops.spec import Kernel, OpSpec, define


def fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, is_causal: bool = True,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, nan_rows: bool = False,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def sdpa_problem(call: Call) -> str | None:
    if call.softcap is not None:
        return "scaled_dot_product_attention has no soft cap"
    if call.mask is not None and call.mask.dtype not in (torch.bool, call.q.dtype):
        return f"scaled_dot_product_attention takes no {call.mask.dtype} mask beside {call.q.dtype}"
    return "scaled_dot_product_attention has no sinks" if call.sinks is not None else None


define(
    OpSpec(
        name="attention",
        schema="(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool is_causal=True, int? window=None,"
        " float? softcap=None, Tensor? sinks=None, bool nan_rows=False) -> Tensor",
        reference=attention,
        fake=fake,
        kernels=(Kernel("sdpa", "existing", sdpa_problem, attention_sdpa),),
    )
)
