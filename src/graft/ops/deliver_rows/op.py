"""graft::deliver_rows: the tokens of a step to where the host reads them."""

from __future__ import annotations

from torch import Tensor

from graft.ops.call import Call
from graft.ops.deliver_rows.reference import deliver_rows
from graft.ops.selection import choose
from graft.ops.spec import Kernel, OpSpec, define, needs_triton


def fake(tokens: Tensor, filled: Tensor, ring: Tensor) -> Tensor:
    return filled.new_empty(1)


def triton_problem(call: Call) -> str | None:
    """The ring may be pinned memory of the host, which the device writes to."""
    ring = call.ring
    if ring.stride(1) != 1 or not (ring.is_pinned() or ring.device == call.tokens.device):
        return "the ring is no memory that the device can write to, line by line"
    return needs_triton(call.tokens, call.filled)


def run_triton(tokens: Tensor, filled: Tensor, ring: Tensor) -> Tensor:
    from graft.ops.deliver_rows.triton import deliver_rows_triton

    return deliver_rows_triton(tokens, filled, ring)


SPEC = define(
    OpSpec(
        name="deliver_rows",
        schema="(Tensor tokens, Tensor(a!) filled, Tensor(b!) ring) -> Tensor",
        reference=deliver_rows,
        fake=fake,
        kernels=(Kernel("triton", "triton", triton_problem, run_triton),),
    )
)


def deliver(tokens: Tensor, filled: Tensor, ring: Tensor) -> None:
    """The same, for tensors of two devices."""
    choose(SPEC, SPEC.call(tokens, filled, ring)).run(tokens, filled, ring)
