"""graft::swiglu(gate, up, activation, upcast)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graft.ops.call import Call
from graft.ops.spec import Kernel, OpSpec, define, native, needs_triton
from graft.ops.swiglu.reference import swiglu


def fake(gate: Tensor, up: Tensor, activation: str = "silu", upcast: bool = False) -> Tensor:
    return gate.new_empty(gate.shape)


def triton_problem(call: Call) -> str | None:
    gate, up = call.gate, call.up
    if gate.dtype != up.dtype or gate.shape != up.shape:
        return "gate and up differ in dtype or shape"
    if gate.stride(-1) != 1 or up.stride(-1) != 1:
        return "the last dim is strided"
    return needs_triton(gate, up)


def run_triton(*args: Any) -> Tensor:
    from graft.ops.swiglu.triton import swiglu_triton

    return swiglu_triton(*args)


define(
    OpSpec(
        name="swiglu",
        schema='(Tensor gate, Tensor up, str activation="silu", bool upcast=False) -> Tensor',
        reference=swiglu,
        fake=fake,
        kernels=(Kernel("triton", "triton", triton_problem, run_triton), native()),
    )
)
