"""graft::rms_norm(x, weight, eps, offset, cast_last, dtype, residual)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graft.ops.call import Call
from graft.ops.rms_norm.reference import rms_norm
from graft.ops.spec import Kernel, OpSpec, define, native, needs_triton, vector_problem


def fake(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    cast_last: bool = False,
    dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    row = dtype or x.dtype
    return x.new_empty(x.shape, dtype=row if cast_last else torch.promote_types(row, weight.dtype))


def triton_problem(call: Call) -> str | None:
    row = call.dtype or call.x.dtype
    if row != call.weight.dtype:
        return f"the row is {row} and weight is {call.weight.dtype}"
    if call.residual is not None and (call.residual.dtype != row or call.residual.shape != call.x.shape):
        return f"the residual is {call.residual.dtype} and the row {row}, or it is broadcast"
    return vector_problem(call.x.shape[-1], call.weight) or needs_triton(call.x, call.weight, call.residual)


def aten_problem(call: Call) -> str | None:
    if call.dtype is not None:
        return f"torch.rms_norm does not round its row to another dtype ({call.dtype})"
    if call.residual is not None:
        return "torch.rms_norm adds no residual"
    return aten_norm_problem(call)


def aten_norm_problem(call: Call) -> str | None:
    """Of any op with a norm: x, weight and offset."""
    if call.x.dtype != torch.float32 or call.weight.dtype != torch.float32:
        return "torch.rms_norm rounds elsewhere than the models do, except in float32"
    return f"torch.rms_norm has no weight offset ({call.offset})" if call.offset else None


def run_aten(x: Tensor, weight: Tensor, eps: float, *_: object) -> Tensor:
    return torch.rms_norm(x, weight.shape, weight, eps)


def run_triton(*args: Any) -> Tensor:
    from graft.ops.rms_norm.triton import rms_norm_triton

    return rms_norm_triton(*args)


define(
    OpSpec(
        name="rms_norm",
        schema="(Tensor x, Tensor weight, float eps, float offset=0.0, bool cast_last=False, ScalarType? dtype=None,"
        " Tensor? residual=None) -> Tensor",
        reference=rms_norm,
        fake=fake,
        kernels=(
            Kernel("aten", "existing", aten_problem, run_aten),
            Kernel("triton", "triton", triton_problem, run_triton),
            native(),
        ),
    )
)
