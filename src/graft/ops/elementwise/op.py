"""graft::elementwise(inputs, program) -> values: a chain of pointwise ops in one pass over memory.

The program says what is computed (program.py). Every result is contiguous and has the loop shape, that of all inputs
broadcast together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graft.ops.call import Call
from graft.ops.elementwise.codegen import triton_problem
from graft.ops.elementwise.inductor import elementwise_inductor, inductor_problem
from graft.ops.elementwise.reference import elementwise, kinds_of, returned_dtypes
from graft.ops.spec import Kernel, OpSpec, define, needs_triton


def fake(inputs: Sequence[Tensor], program: str) -> list[Tensor]:
    dtypes = returned_dtypes(program, inputs)
    shape = torch.broadcast_shapes(*(t.shape for t in inputs))
    return [inputs[0].new_empty(shape, dtype=dtype) for dtype in dtypes]


def triton_call_problem(call: Call) -> str | None:
    return needs_triton(*call.inputs) or triton_problem(call.program, kinds_of(call.inputs))


def inductor_call_problem(call: Call) -> str | None:
    return inductor_problem(call.inputs)


def run_triton(inputs: Sequence[Tensor], program: str) -> list[Tensor]:
    from graft.ops.elementwise.triton import elementwise_triton

    return elementwise_triton(inputs, program)


define(
    OpSpec(
        name="elementwise",
        schema="(Tensor[] inputs, str program) -> Tensor[]",
        reference=elementwise,
        fake=fake,
        kernels=(
            Kernel("inductor", "existing", inductor_call_problem, elementwise_inductor),
            Kernel("triton", "triton", triton_call_problem, run_triton),
        ),
    )
)
