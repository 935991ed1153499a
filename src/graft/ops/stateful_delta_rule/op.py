"""graft::stateful_delta_rule: the gated delta rule over packed tokens, with a state kept for each sequence."""

from __future__ import annotations

from torch import Tensor

from graft.ops.spec import Kernel, OpSpec, define, takes_all
from graft.ops.stateful_delta_rule.reference import stateful_delta_rule, stateful_delta_rule_chunked


def fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, state_slots: Tensor, cu_seqlens: Tensor,
    seq_lens: Tensor, lens_cpu: Tensor, l2_norm: bool = False,
) -> Tensor:  # fmt: skip
    return q.new_empty(v.shape)


define(
    OpSpec(
        name="stateful_delta_rule",
        schema="(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor state_slots,"
        " Tensor cu_seqlens, Tensor seq_lens, Tensor lens_cpu, bool l2_norm=False) -> Tensor",
        reference=stateful_delta_rule,
        fake=fake,
        kernels=(Kernel("chunked", "existing", takes_all, stateful_delta_rule_chunked),),
    )
)
