"""graft::all_reduce(x, world): the parts of a sum that the ranks of a model have, added up."""

from __future__ import annotations

from torch import Tensor

from graft.ops.all_reduce.reference import all_reduce
from graft.ops.call import Call
from graft.ops.ranks import in_thread
from graft.ops.spec import Kernel, OpSpec, define


def fake(x: Tensor, world: int) -> Tensor:
    return x.new_empty(x.shape)


def group_problem(call: Call) -> str | None:
    if call.world == 1:
        return "one rank has nobody to exchange with"
    return "the ranks are threads of one process" if in_thread() else None


define(
    OpSpec(
        name="all_reduce",
        schema="(Tensor x, int world) -> Tensor",
        reference=all_reduce,
        fake=fake,
        kernels=(Kernel("torch.distributed", "existing", group_problem, all_reduce),),
    )
)
