"""graft::add_rms_norm(x, residual, weight, eps, offset, cast_last, wide) -> (normalized, sum)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graft.ops.add_rms_norm.reference import add_rms_norm
from graft.ops.call import Call
from graft.ops.rms_norm.op import aten_norm_problem
from graft.ops.spec import Kernel, OpSpec, define, native, needs_triton, vector_problem


def fake(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    cast_last: bool = False,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    total = x.new_empty(x.shape)
    dtype = x.dtype if cast_last else torch.promote_types(x.dtype, weight.dtype)
    return x.new_empty(x.shape, dtype=dtype), total


def triton_problem(call: Call) -> str | None:
    x, residual, weight = call.x, call.residual, call.weight
    if not x.dtype == residual.dtype == weight.dtype:
        return f"dtypes differ: {x.dtype}, {residual.dtype}, {weight.dtype}"
    if x.shape != residual.shape:
        return f"x is {tuple(x.shape)} and residual is {tuple(residual.shape)}"
    return vector_problem(x.shape[-1], weight) or needs_triton(x, residual, weight)


def aten_problem(call: Call) -> str | None:
    return "two launches where one kernel does both" if call.x.device.type != "cpu" else aten_norm_problem(call)


def run_aten(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *_: object) -> tuple[Tensor, Tensor]:
    total = x + residual
    return torch.rms_norm(total, weight.shape, weight, eps), total


def run_triton(*args: Any) -> tuple[Tensor, Tensor]:
    from graft.ops.add_rms_norm.triton import add_rms_norm_triton

    return add_rms_norm_triton(*args)


define(
    OpSpec(
        name="add_rms_norm",
        schema="(Tensor x, Tensor residual, Tensor weight, float eps, float offset=0.0, bool cast_last=False,"
        " bool wide=False) -> (Tensor, Tensor)",
        reference=add_rms_norm,
        fake=fake,
        kernels=(
            Kernel("aten", "existing", aten_problem, run_aten),
            Kernel("triton", "triton", triton_problem, run_triton),
            native(),
        ),
    )
)
