"""graft::rms_norm(x, weight, eps, offset, cast_last, dtype)."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.ops.rms_norm.reference import rms_norm
from graft.ops.spec import Kernel, OpSpec, define, needs_triton


def fake(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    cast_last: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    row = dtype or x.dtype
    return x.new_empty(x.shape, dtype=row if cast_last else torch.promote_types(row, weight.dtype))


def triton_supports(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    cast_last: bool = False,
    dtype: torch.dtype | None = None,
) -> str | None:
    if (dtype or x.dtype) != weight.dtype:
        return f"the row is {dtype or x.dtype} and weight is {weight.dtype}"
    return needs_triton(x, weight)


def aten_supports(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    cast_last: bool = False,
    dtype: torch.dtype | None = None,
) -> str | None:
    if dtype is not None:
        return f"torch.rms_norm does not round its row to another dtype ({dtype})"
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return "torch.rms_norm rounds elsewhere than the models do, except in float32"
    return f"torch.rms_norm has no weight offset ({offset})" if offset else None


def run_aten(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    cast_last: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return torch.rms_norm(x, weight.shape, weight, eps)


def run_triton(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    cast_last: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    from graft.ops.rms_norm.triton import rms_norm_triton

    return rms_norm_triton(x, weight, eps, offset, cast_last, dtype)


define(
    OpSpec(
        name="rms_norm",
        schema="(Tensor x, Tensor weight, float eps, float offset=0.0, bool cast_last=False, ScalarType? dtype=None)"
        " -> Tensor",
        reference=rms_norm,
        fake=fake,
        kernels=(
            Kernel("aten", "existing_kernel", run_aten, aten_supports),
            Kernel("triton", "triton", run_triton, triton_supports),
        ),
    )
)
