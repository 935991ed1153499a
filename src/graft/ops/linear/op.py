"""graft::linear(x, w, b): a linear layer that need not run in the dtype of its weights."""

from __future__ import annotations

from torch import Tensor

from graft.ops.linear.reference import linear, linear_float32
from graft.ops.narrow import widen_problem
from graft.ops.spec import Kernel, OpSpec, define


def fake(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


define(
    OpSpec(
        name="linear",
        schema="(Tensor x, Tensor w, Tensor? b=None) -> Tensor",
        reference=linear,
        fake=fake,
        kernels=(
            Kernel("float32", "existing_kernel", linear_float32, widen_problem),
            Kernel("aten", "existing_kernel", linear, lambda *_: None),
        ),
    )
)
