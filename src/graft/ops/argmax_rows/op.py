"""graft::argmax_rows(logits): the greedy choice of a token."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.ops.argmax_rows.reference import argmax_rows
from graft.ops.call import Call
from graft.ops.selection import choose
from graft.ops.spec import Kernel, OpSpec, define, needs_triton

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # the kernel compares in float32


def fake(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[:1], dtype=torch.int64)


def triton_problem(call: Call) -> str | None:
    if call.logits.dtype not in DTYPES:
        return f"the kernel compares float32 numbers, the rows are {call.logits.dtype}"
    return needs_triton(call.logits)


def run_triton(logits: Tensor) -> Tensor:
    from graft.ops.argmax_rows.triton import argmax_rows_triton

    return argmax_rows_triton(logits)


SPEC = define(
    OpSpec(
        name="argmax_rows",
        schema="(Tensor logits) -> Tensor",
        reference=argmax_rows,
        fake=fake,
        kernels=(Kernel("triton", "triton", triton_problem, run_triton),),
    )
)


def argmax_into(out: Tensor, logits: Tensor) -> None:
    """The same into `out` [n] int64, without a kernel for the copy where there is one for the rows."""
    if choose(SPEC, SPEC.call(logits)).kernel.kind == "triton":
        from graft.ops.argmax_rows.triton import argmax_rows_triton

        argmax_rows_triton(logits, out)
    else:
        out.copy_(argmax_rows(logits))
