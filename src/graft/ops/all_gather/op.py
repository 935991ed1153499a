"""graft::all_gather(x, world): the parts of a row that the ranks of a model have, side by side."""

from __future__ import annotations

from torch import Tensor

from graft.ops.all_gather.reference import all_gather
from graft.ops.all_reduce.op import group_problem
from graft.ops.spec import Kernel, OpSpec, define


def fake(x: Tensor, world: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] * world))


define(
    OpSpec(
        name="all_gather",
        schema="(Tensor x, int world) -> Tensor",
        reference=all_gather,
        fake=fake,
        kernels=(Kernel("torch.distributed", "existing", group_problem, all_gather),),
    )
)
