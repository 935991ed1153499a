"""graft::l2_norm(x, eps, form)."""

from __future__ import annotations

from torch import Tensor

from graft.ops.l2_norm.reference import l2_norm
from graft.ops.spec import Kernel, OpSpec, define, needs_triton


def fake(x: Tensor, eps: float, form: str = "sum") -> Tensor:
    return x.new_empty(x.shape)


def triton_supports(x: Tensor, *_: object) -> str | None:
    return needs_triton(x)


def run_triton(x: Tensor, eps: float, form: str = "sum") -> Tensor:
    from graft.ops.l2_norm.triton import l2_norm_triton

    return l2_norm_triton(x, eps, form)


define(
    OpSpec(
        name="l2_norm",
        schema='(Tensor x, float eps, str form="sum") -> Tensor',
        reference=l2_norm,
        fake=fake,
        kernels=(Kernel("triton", "triton", run_triton, triton_supports),),
    )
)
