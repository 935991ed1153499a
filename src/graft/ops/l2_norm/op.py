"""graft::l2_norm(x, eps, form)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graft.ops.call import Call
from graft.ops.l2_norm.reference import l2_norm
from graft.ops.spec import Kernel, OpSpec, define, needs_triton


def fake(x: Tensor, eps: float, form: str = "sum") -> Tensor:
    return x.new_empty(x.shape)


def triton_problem(call: Call) -> str | None:
    return needs_triton(call.x)


def run_triton(*args: Any) -> Tensor:
    from graft.ops.l2_norm.triton import l2_norm_triton

    return l2_norm_triton(*args)


define(
    OpSpec(
        name="l2_norm",
        schema='(Tensor x, float eps, str form="sum") -> Tensor',
        reference=l2_norm,
        fake=fake,
        kernels=(Kernel("triton", "triton", triton_problem, run_triton),),
    )
)
