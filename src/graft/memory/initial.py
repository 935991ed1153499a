"""The values that state had when a module was compiled, to go back to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from graft.ir.edit import attribute
from graft.memory.writes import state_writes


@dataclass(frozen=True)
class Initial:
    """A tensor of one value, as caches start, is kept as that value: a copy would double the memory of the cache."""

    value: torch.Tensor  # 0-d when every element has it

    @staticmethod
    def of(tensor: torch.Tensor) -> Initial:
        first = tensor.flatten()[:1]
        uniform = tensor.numel() > 1 and bool((tensor == first).all())
        return Initial(first.clone()[0] if uniform else tensor.detach().clone())

    def put(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self.value)


def written_buffers(gm: GraphModule) -> dict[str, torch.Tensor]:
    """The buffers that the graph writes, by name."""
    names = dict.fromkeys(str(w.owner.target) for w in state_writes(gm) if w.owner.op == "get_attr")
    return {name: tensor for name in names if isinstance(tensor := attribute(gm, name), torch.Tensor)}


def initial_values(gm: GraphModule, known: Mapping[str, Initial] | None = None) -> dict[str, Initial]:
    """What `reset` needs. `known`: values from before the module ever ran, which are kept."""
    return {name: (known or {}).get(name) or Initial.of(tensor) for name, tensor in written_buffers(gm).items()}
