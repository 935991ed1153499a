"""graft::swiglu(gate, up, activation, upcast)."""

from __future__ import annotations

from torch import Tensor

from graft.ops.spec import Kernel, OpSpec, define, needs_triton
from graft.ops.swiglu.reference import swiglu


def fake(gate: Tensor, up: Tensor, activation: str = "silu", upcast: bool = False) -> Tensor:
    return gate.new_empty(gate.shape)


def triton_supports(gate: Tensor, up: Tensor, *_: object) -> str | None:
    if gate.dtype != up.dtype or gate.shape != up.shape:
        return "gate and up differ in dtype or shape"
    if gate.stride(-1) != 1 or up.stride(-1) != 1:
        return "the last dim is strided"
    return needs_triton(gate, up)


def run_triton(gate: Tensor, up: Tensor, activation: str = "silu", upcast: bool = False) -> Tensor:
    from graft.ops.swiglu.triton import swiglu_triton

    return swiglu_triton(gate, up, activation, upcast)


define(
    OpSpec(
        name="swiglu",
        schema='(Tensor gate, Tensor up, str activation="silu", bool upcast=False) -> Tensor',
        reference=swiglu,
        fake=fake,
        kernels=(Kernel("triton", "triton", run_triton, triton_supports),),
    )
)
