"""The sum over the ranks of a model, by the group that this thread or process is in."""

from __future__ import annotations

from torch import Tensor

from graft.ops.ranks import current_group


def all_reduce(x: Tensor, world: int) -> Tensor:
    """x: the part of this rank, of one shape on all. Gives a new tensor, with equal bits on all ranks."""
    return x.clone() if world == 1 else current_group(world).all_reduce(x)
