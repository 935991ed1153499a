"""graft::moe_route(logits, top_k, normalize, dtype, select_first, scoring)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graft.ops.call import Call
from graft.ops.moe_route.reference import moe_route
from graft.ops.spec import Kernel, OpSpec, define, native, needs_triton

MOST_EXPERTS = 1024  # one program holds a row of logits in registers


def fake(
    logits: Tensor, top_k: int, normalize: bool, dtype: torch.dtype, select_first: bool = False,
    scoring: str = "softmax",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = (*logits.shape[:-1], top_k)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


def triton_problem(call: Call) -> str | None:
    logits = call.logits
    if logits.dim() != 2:
        return f"logits have {logits.dim()} dims, not [n, e]"
    if logits.shape[-1] > MOST_EXPERTS:
        return f"{logits.shape[-1]} experts are more than {MOST_EXPERTS}"
    return needs_triton(logits)


def native_problem(call: Call) -> str | None:
    return None if call.scoring == "softmax" else f"experts are chosen by {call.scoring}"


def run_triton(*args: Any) -> tuple[Tensor, Tensor]:
    from graft.ops.moe_route.triton import moe_route_triton

    return moe_route_triton(*args)


define(
    OpSpec(
        name="moe_route",
        schema="(Tensor logits, int top_k, bool normalize, ScalarType dtype, bool select_first=False,"
        ' str scoring="softmax") -> (Tensor, Tensor)',
        reference=moe_route,
        fake=fake,
        kernels=(Kernel("triton", "triton", triton_problem, run_triton), native(native_problem)),
    )
)
