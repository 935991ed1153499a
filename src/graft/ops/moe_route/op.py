"""graft::moe_route(logits, top_k, normalize, dtype, select_first, scoring, bias, groups, …)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graft.ops.call import Call
from graft.ops.moe_route.reference import moe_route
from graft.ops.spec import Kernel, OpSpec, define, native, needs_triton

MOST_EXPERTS = 1024  # one program holds a row of logits in registers
MOST_GROUPS = 16  # the loop over groups is unrolled


def fake(
    logits: Tensor, top_k: int, normalize: bool, dtype: torch.dtype, select_first: bool = False,
    scoring: str = "softmax", bias: Tensor | None = None, groups: int = 1, top_groups: int = 1, group_best: int = 1,
    eps: float = 0.0, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = (*logits.shape[:-1], top_k)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


def triton_problem(call: Call) -> str | None:
    logits = call.logits
    if logits.dim() != 2:
        return f"logits have {logits.dim()} dims, not [n, e]"
    if logits.shape[-1] > MOST_EXPERTS:
        return f"{logits.shape[-1]} experts are more than {MOST_EXPERTS}"
    if call.top_groups < call.groups and call.groups > MOST_GROUPS:
        return f"{call.groups} groups of experts are more than {MOST_GROUPS}"
    return group_problem(call) or needs_triton(logits)


def group_problem(call: Call) -> str | None:
    if call.top_groups < call.groups and call.group_best > 2:
        return f"groups are chosen by their {call.group_best} best experts, and not by one or two"
    return None


def native_problem(call: Call) -> str | None:
    if call.select_first and call.scoring != "softmax":
        return f"experts are chosen first and weighed by {call.scoring}"
    return group_problem(call)


def run_triton(*args: Any) -> tuple[Tensor, Tensor]:
    from graft.ops.moe_route.triton import moe_route_triton

    return moe_route_triton(*args)


define(
    OpSpec(
        name="moe_route",
        schema="(Tensor logits, int top_k, bool normalize, ScalarType dtype, bool select_first=False,"
        ' str scoring="softmax", Tensor? bias=None, int groups=1, int top_groups=1, int group_best=1,'
        " float eps=0.0, float scale=1.0) -> (Tensor, Tensor)",
        reference=moe_route,
        fake=fake,
        kernels=(Kernel("triton", "triton", triton_problem, run_triton), native(native_problem)),
    )
)
