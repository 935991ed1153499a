"""graft::rms_norm(x, weight, eps, offset, cast_last)."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.ops.rms_norm.reference import rms_norm
from graft.ops.spec import Kernel, OpSpec, define, needs_triton


def fake(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, cast_last: bool = False) -> Tensor:
    dtype = x.dtype if cast_last else torch.promote_types(x.dtype, weight.dtype)
    return x.new_empty(x.shape, dtype=dtype)


def triton_supports(x: Tensor, weight: Tensor, *_: object) -> str | None:
    if x.dtype != weight.dtype:
        return f"x is {x.dtype} and weight is {weight.dtype}"
    return needs_triton(x, weight)


def aten_supports(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, cast_last: bool = False) -> str | None:
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return "torch.rms_norm rounds elsewhere than the models do, except in float32"
    return f"torch.rms_norm has no weight offset ({offset})" if offset else None


def run_aten(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, cast_last: bool = False) -> Tensor:
    return torch.rms_norm(x, weight.shape, weight, eps)


def run_triton(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, cast_last: bool = False) -> Tensor:
    from graft.ops.rms_norm.triton import rms_norm_triton

    return rms_norm_triton(x, weight, eps, offset, cast_last)


define(
    OpSpec(
        name="rms_norm",
        schema="(Tensor x, Tensor weight, float eps, float offset=0.0, bool cast_last=False) -> Tensor",
        reference=rms_norm,
        fake=fake,
        kernels=(
            Kernel("aten", "existing_kernel", run_aten, aten_supports),
            Kernel("triton", "triton", run_triton, triton_supports),
        ),
    )
)
