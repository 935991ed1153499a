"""graft::rope(x, cos, sin, interleaved)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graft.ops.call import Call
from graft.ops.rope.reference import rope
from graft.ops.spec import Kernel, OpSpec, define, native, needs_triton


def fake(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    return x.new_empty(x.shape)


def triton_problem(call: Call) -> str | None:
    x, cos, sin = call.x, call.cos, call.sin
    return layout_problem(x, cos, sin, ranks=(3, 4)) or needs_triton(x, cos, sin)


def layout_problem(x: Tensor, cos: Tensor, sin: Tensor, ranks: tuple[int, ...] = (4,)) -> str | None:
    """Why a kernel that rotates one head of one token a program cannot read these, or None."""
    if cos.dtype != sin.dtype or torch.float64 in (x.dtype, cos.dtype):
        return f"dtypes are {x.dtype}, {cos.dtype}, {sin.dtype}; it takes 16 and 32 bits, cos and sin alike"
    if x.dim() not in ranks or x.stride(-1) != 1:
        packed = ", or [t, h, d] for packed tokens," if 3 in ranks else ""
        return f"x must be [b, h, s, d] or [b, s, h, d]{packed} with unit last stride"
    return "an odd number of values cannot turn in pairs" if cos.shape[-1] % 2 else None


def run_triton(*args: Any) -> Tensor:
    from graft.ops.rope.triton import rope_triton

    return rope_triton(*args)


define(
    OpSpec(
        name="rope",
        schema="(Tensor x, Tensor cos, Tensor sin, bool interleaved=False) -> Tensor",
        reference=rope,
        fake=fake,
        kernels=(Kernel("triton", "triton", triton_problem, run_triton), native()),
    )
)
