"""graft::moe_route(logits, top_k, normalize, dtype, select_first, scoring)."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.ops.moe_route.reference import moe_route
from graft.ops.spec import Kernel, OpSpec, define, needs_triton

MOST_EXPERTS = 1024  # one program holds a row of logits in registers


def fake(
    logits: Tensor, top_k: int, normalize: bool, dtype: torch.dtype, select_first: bool = False,
    scoring: str = "softmax",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = (*logits.shape[:-1], top_k)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


def triton_supports(logits: Tensor, *_: object) -> str | None:
    if logits.dim() != 2:
        return f"logits have {logits.dim()} dims, not [n, e]"
    if logits.shape[-1] > MOST_EXPERTS:
        return f"{logits.shape[-1]} experts are more than {MOST_EXPERTS}"
    return needs_triton(logits)


def run_triton(
    logits: Tensor, top_k: int, normalize: bool, dtype: torch.dtype, select_first: bool = False,
    scoring: str = "softmax",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from graft.ops.moe_route.triton import moe_route_triton

    return moe_route_triton(logits, top_k, normalize, dtype, select_first, scoring)


define(
    OpSpec(
        name="moe_route",
        schema="(Tensor logits, int top_k, bool normalize, ScalarType dtype, bool select_first=False,"
        ' str scoring="softmax") -> (Tensor, Tensor)',
        reference=moe_route,
        fake=fake,
        kernels=(Kernel("triton", "triton", run_triton, triton_supports),),
    )
)
