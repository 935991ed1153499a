"""graft::causal_conv: what the causal depthwise convolution of a recurrent layer becomes in a captured graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graft.ops.call import Call
from graft.ops.causal_conv.reference import NONE, causal_conv
from graft.ops.spec import Kernel, OpSpec, define, needs_triton


def fake(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = NONE) -> Tensor:
    return x.new_empty(x.shape)


def triton_problem(call: Call) -> str | None:
    if torch.float64 in (call.x.dtype, call.weight.dtype):
        return "it adds up in float32"
    return needs_triton(call.x, call.weight, call.bias)


def run_triton(*args: Any) -> Tensor:
    from graft.ops.causal_conv.triton import causal_conv_triton

    return causal_conv_triton(*args)


define(
    OpSpec(
        name="causal_conv",
        schema='(Tensor x, Tensor weight, Tensor? bias=None, str activation="none") -> Tensor',
        reference=causal_conv,
        fake=fake,
        kernels=(Kernel("triton", "triton", triton_problem, run_triton),),
    )
)
