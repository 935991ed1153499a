"""graft::rms_norm_rope(x, weight, cos, sin, eps, offset, cast_last, interleaved)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graft.ops.call import Call
from graft.ops.rms_norm.op import aten_norm_problem
from graft.ops.rms_norm.op import run_aten as run_aten_norm
from graft.ops.rms_norm_rope.reference import rms_norm_rope
from graft.ops.rope.op import layout_problem
from graft.ops.rope.reference import rope
from graft.ops.spec import Kernel, OpSpec, define, native, needs_triton


def fake(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float = 0.0,
    cast_last: bool = False,
    interleaved: bool = False,
) -> Tensor:
    dtype = x.dtype if cast_last else torch.promote_types(x.dtype, weight.dtype)
    return x.new_empty(x.shape, dtype=dtype)


def triton_problem(call: Call) -> str | None:
    x, weight, cos, sin = call.x, call.weight, call.cos, call.sin
    if x.dtype != weight.dtype:
        return f"x is {x.dtype} and weight is {weight.dtype}"
    return layout_problem(x, cos, sin, ranks=(3, 4)) or needs_triton(x, weight, cos, sin)


def aten_problem(call: Call) -> str | None:
    if call.x.device.type != "cpu":
        return (
            f"torch.rms_norm and the rotation are many passes, which is for a CPU; the tensors are on {call.x.device}"
        )
    return aten_norm_problem(call)


def run_aten(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float = 0.0, cast_last: bool = False,
    interleaved: bool = False,
) -> Tensor:  # fmt: skip
    return rope(run_aten_norm(x, weight, eps, offset, cast_last), cos, sin, interleaved)


def run_triton(*args: Any) -> Tensor:
    from graft.ops.rms_norm_rope.triton import rms_norm_rope_triton

    return rms_norm_rope_triton(*args)


define(
    OpSpec(
        name="rms_norm_rope",
        schema="(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps, float offset=0.0, bool cast_last=False,"
        " bool interleaved=False) -> Tensor",
        reference=rms_norm_rope,
        fake=fake,
        kernels=(
            Kernel("aten", "existing", aten_problem, run_aten),
            Kernel("triton", "triton", triton_problem, run_triton),
            native(),
        ),
    )
)
