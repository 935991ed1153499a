"""graft::advance_rows: the inputs of the next decode step, from the tokens of the last one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graft.ops.advance_rows.reference import advance_rows
from graft.ops.call import Call
from graft.ops.selection import choose
from graft.ops.spec import Kernel, OpSpec, define, needs_triton


def fake(
    tokens: Tensor, seq_lens: Tensor, live: Tensor, entries: Tensor, blocks: Tensor, block_tables: Tensor,
    padding: int, block_size: int,
) -> Tensor:  # fmt: skip
    return tokens.new_empty(3, tokens.shape[0])


def triton_problem(call: Call) -> str | None:
    return needs_triton(call.tokens)


def run_triton(*args: Any) -> Tensor:
    from graft.ops.advance_rows.triton import advance_rows_triton

    return advance_rows_triton(*args)


SPEC = define(
    OpSpec(
        name="advance_rows",
        schema="(Tensor tokens, Tensor(a!) seq_lens, Tensor(b!) live, Tensor(c!) entries, Tensor blocks,"
        " Tensor(d!) block_tables, int padding, int block_size) -> Tensor",
        reference=advance_rows,
        fake=fake,
        kernels=(Kernel("triton", "triton", triton_problem, run_triton),),
    )
)


def advance_into(out: Tensor, *args: Any) -> None:
    """The same into `out` [3, B], whose lines may lie apart."""
    if choose(SPEC, SPEC.call(*args)).kernel.kind == "triton":
        from graft.ops.advance_rows.triton import advance_rows_triton

        advance_rows_triton(*args, out=out)
    else:
        out.copy_(advance_rows(*args))
