"""graft::stateful_delta_rule: the gated delta rule over packed tokens, with a state kept for each sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graft.ops.call import Call
from graft.ops.spec import Kernel, OpSpec, define, needs_triton, takes_all
from graft.ops.stateful_delta_rule.reference import stateful_delta_rule, stateful_delta_rule_chunked

FEW = 64  # tokens beyond one a sequence, up to which they are fed one by one; a chunk's


def fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, state_slots: Tensor, cu_seqlens: Tensor,
    seq_lens: Tensor, lens_cpu: Tensor, l2_norm: bool = False,
) -> Tensor:  # fmt: skip
    return q.new_empty(v.shape)


def triton_problem(call: Call) -> str | None:
    state = call.state
    if state.dtype is not torch.float32:
        return f"it keeps states in float32, and these are {state.dtype}"
    if state.stride()[1:] != (state.shape[2] * state.shape[3], state.shape[3], 1):
        return "the matrices of a sequence must lie side by side"
    return needs_triton(call.q, call.k, call.v, call.g, call.beta, state, call.state_slots)


def length_problem(call: Call) -> str | None:
    """From shapes alone, so that a CUDA graph does not depend on what the host knew when it was captured."""
    more = call.q.shape[1] - call.state_slots.shape[0]
    return None if more <= FEW else f"{more} tokens more than sequences: chunks of a prompt are quicker than tokens"


def run_triton(*args: Any) -> Tensor:
    from graft.ops.stateful_delta_rule.triton import stateful_delta_rule_triton

    return stateful_delta_rule_triton(*args)


define(
    OpSpec(
        name="stateful_delta_rule",
        schema="(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor state_slots,"
        " Tensor cu_seqlens, Tensor seq_lens, Tensor lens_cpu, bool l2_norm=False) -> Tensor",
        reference=stateful_delta_rule,
        fake=fake,
        kernels=(
            Kernel("triton", "triton", triton_problem, run_triton, length_problem),
            Kernel("chunked", "existing", takes_all, stateful_delta_rule_chunked),
        ),
    )
)
