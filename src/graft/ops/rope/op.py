"""graft::rope(x, cos, sin)."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.ops.rope.reference import rope
from graft.ops.spec import Kernel, OpSpec, define, needs_triton


def fake(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def triton_supports(x: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    if cos.dtype != sin.dtype or cos.dtype not in (x.dtype, torch.float32):
        return f"dtypes differ: {x.dtype}, {cos.dtype}, {sin.dtype}"
    if x.dim() != 4 or cos.dim() != 4 or cos.shape[1] != 1 or x.stride(-1) != 1:
        return "x must be [b, h, s, d] with unit last stride and cos [b, 1, s, r]"
    return needs_triton(x, cos, sin)


def run_triton(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    from graft.ops.rope.triton import rope_triton

    return rope_triton(x, cos, sin)


SPEC = define(
    OpSpec(
        name="rope",
        schema="(Tensor x, Tensor cos, Tensor sin) -> Tensor",
        reference=rope,
        fake=fake,
        kernels=(Kernel("triton", "triton", run_triton, triton_supports),),
    )
)
