"""graft::stateful_causal_conv: a causal convolution over packed tokens, keeping the last inputs of each sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graft.ops.call import Call
from graft.ops.causal_conv import op as whole
from graft.ops.causal_conv.reference import NONE
from graft.ops.spec import Kernel, OpSpec, define
from graft.ops.stateful_causal_conv.reference import stateful_causal_conv, stateful_causal_conv_windows


def fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, state_slots: Tensor, token_to_seq: Tensor,
    cu_seqlens: Tensor, seq_lens: Tensor, lens_cpu: Tensor, activation: str = NONE,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape)


def windows_problem(call: Call) -> str | None:
    return None if call.weight.shape[1] > 1 else "a single tap keeps nothing"


def triton_problem(call: Call) -> str | None:
    taps = call.weight.shape[1]
    if problem := windows_problem(call) or whole.triton_problem(call):
        return problem
    return None if call.state.stride()[1:] == (taps - 1, 1) else "the inputs of a sequence must lie side by side"


def run_triton(*args: Any) -> Tensor:
    from graft.ops.stateful_causal_conv.triton import stateful_causal_conv_triton

    return stateful_causal_conv_triton(*args)


define(
    OpSpec(
        name="stateful_causal_conv",
        schema="(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor state_slots, Tensor token_to_seq,"
        ' Tensor cu_seqlens, Tensor seq_lens, Tensor lens_cpu, str activation="none") -> Tensor',
        reference=stateful_causal_conv,
        fake=fake,
        kernels=(
            Kernel("triton", "triton", triton_problem, run_triton),
            Kernel("windows", "existing", windows_problem, stateful_causal_conv_windows),
        ),
    )
)
