"""graft::causal_conv: what the causal depthwise convolution of a recurrent layer becomes in a captured graph."""

from __future__ import annotations

from torch import Tensor

from graft.ops.causal_conv.reference import NONE, causal_conv
from graft.ops.spec import OpSpec, define


def fake(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = NONE) -> Tensor:
    return x.new_empty(x.shape)


define(
    OpSpec(
        name="causal_conv",
        schema='(Tensor x, Tensor weight, Tensor? bias=None, str activation="none") -> Tensor',
        reference=causal_conv,
        fake=fake,
    )
)
