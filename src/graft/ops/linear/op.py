"""graft::linear(x, w, b): a linear layer that need not run in the dtype of its weights."""

from __future__ import annotations

from torch import Tensor

from graft.ops.call import Call
from graft.ops.half_precision import widen_problem
from graft.ops.linear.reference import linear, linear_float32
from graft.ops.spec import Kernel, OpSpec, define, native, takes_all


def fake(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def widen_call_problem(call: Call) -> str | None:
    return widen_problem(call.x, call.w, call.b)


define(
    OpSpec(
        name="linear",
        schema="(Tensor x, Tensor w, Tensor? b=None) -> Tensor",
        reference=linear,
        fake=fake,
        kernels=(
            Kernel("float32", "existing", widen_call_problem, linear_float32),
            Kernel("aten", "existing", takes_all, linear),
            native(),
        ),
    )
)
