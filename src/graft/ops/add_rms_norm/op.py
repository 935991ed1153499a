"""graft::add_rms_norm(x, residual, weight, eps, offset, cast_last, wide) -> (normalized, sum)."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.ops.add_rms_norm.reference import add_rms_norm
from graft.ops.rms_norm import op as norm
from graft.ops.spec import Kernel, OpSpec, define, needs_triton


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


def triton_supports(x: Tensor, residual: Tensor, weight: Tensor, *_: object) -> str | None:
    if not x.dtype == residual.dtype == weight.dtype:
        return f"dtypes differ: {x.dtype}, {residual.dtype}, {weight.dtype}"
    if x.shape != residual.shape:
        return f"x is {tuple(x.shape)} and residual is {tuple(residual.shape)}"
    return needs_triton(x, residual, weight)


def aten_supports(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    cast_last: bool = False,
    wide: bool = False,
) -> str | None:
    if x.device.type != "cpu":
        return "two launches where one kernel does both"
    return norm.aten_supports(x, weight, eps, offset, cast_last)


def run_aten(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    cast_last: bool = False,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return torch.rms_norm(total, weight.shape, weight, eps), total


def run_triton(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    cast_last: bool = False,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    from graft.ops.add_rms_norm.triton import add_rms_norm_triton

    return add_rms_norm_triton(x, residual, weight, eps, offset, cast_last, wide)


define(
    OpSpec(
        name="add_rms_norm",
        schema="(Tensor x, Tensor residual, Tensor weight, float eps, float offset=0.0, bool cast_last=False,"
        " bool wide=False) -> (Tensor, Tensor)",
        reference=add_rms_norm,
        fake=fake,
        kernels=(
            Kernel("aten", "existing_kernel", run_aten, aten_supports),
            Kernel("triton", "triton", run_triton, triton_supports),
        ),
    )
)
