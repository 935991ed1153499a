"""graft::fused_linear: a linear layer with the norm before it and the activation or residual sum after it."""

from __future__ import annotations

from torch import Tensor

from graft.ops.fused_linear.reference import fused_linear
from graft.ops.spec import OpSpec, define


def fake(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, norm: Tensor | None = None,
    eps: float = 0.0, offset: float = 0.0, cast_last: bool = False, activation: str = "none", upcast: bool = False,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    n = weight.shape[0]
    return x.new_empty((*x.shape[:-1], n if activation == "none" else n // 2))


define(
    OpSpec(
        name="fused_linear",
        schema="(Tensor x, Tensor weight, Tensor? bias=None, Tensor? scale=None, Tensor? norm=None, float eps=0.0,"
        ' float offset=0.0, bool cast_last=False, str activation="none", bool upcast=False, Tensor? residual=None)'
        " -> Tensor",
        reference=fused_linear,
        fake=fake,
    )
)
