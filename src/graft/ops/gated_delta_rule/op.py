"""graft::gated_delta_rule: what the recurrence of a linear attention layer becomes in a captured graph."""

from __future__ import annotations

from torch import Tensor

from graft.ops.gated_delta_rule.reference import gated_delta_rule, gated_delta_rule_chunked
from graft.ops.spec import Kernel, OpSpec, define, takes_all


def fake(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, l2_norm: bool = False) -> Tensor:
    return q.new_empty(v.shape)


define(
    OpSpec(
        name="gated_delta_rule",
        schema="(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, bool l2_norm=False) -> Tensor",
        reference=gated_delta_rule,
        fake=fake,
        kernels=(Kernel("chunked", "existing", takes_all, gated_delta_rule_chunked),),
    )
)
