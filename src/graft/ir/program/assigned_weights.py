"""Tensors in a parameter's memory that a forward assigns anew, as old-style `spectral_norm` leaves its weight.

    before the first call:  weight is weight_orig.data       after:  weight is a tensor of its own

A write into the old tensor would change the parameter. So the program is traced once more with the tensor in memory
of its own, as the first call would leave it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.fx import GraphModule

from graft.base.errors import CaptureError
from graft.ir.edit import attribute
from graft.ir.nodes import is_op

aten = torch.ops.aten
Key = tuple[torch.nn.Module, str]
OWN_TENSOR = (
    "eager would part the two, a write into it would change both. Write into it, or give each a tensor of its own"
)


class AssignedWeights(CaptureError):
    """Tensors that lie in a parameter's memory until the program's first call assigns them."""

    def __init__(self, tied: dict[Key, str]) -> None:
        super().__init__(f"forward assigns {'; '.join(tied.values())}: {OWN_TENSOR}")
        self.keys = list(tied)


@contextmanager
def with_memory_of_their_own(error: AssignedWeights) -> Iterator[None]:
    """The tensors as the first call of the program would part them from the parameters; undone where that fails."""
    saved = [(owner, name, getattr(owner, name)) for owner, name in error.keys]
    for owner, name, tensor in saved:
        setattr(owner, name, tensor.detach().clone())
    try:
        yield
    except BaseException:
        for owner, name, tensor in saved:
            setattr(owner, name, tensor)
        raise


def refuse_reads(gm: GraphModule, error: AssignedWeights) -> None:
    """Raises it where the program reads such a tensor before it assigns it: that is the parameter's value once."""
    homes = {id(getattr(owner, name)) for owner, name in error.keys}
    for node in gm.graph.nodes:
        home = node.op == "get_attr" and id(attribute(gm, str(node.target))) in homes
        if home and not all(is_op(user, aten.copy_.default) and node not in user.args[1:] for user in node.users):
            raise error
