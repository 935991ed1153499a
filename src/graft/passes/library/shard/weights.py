"""The part of a weight that a rank has, as a parameter of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from graft.ir.edit import Editor
from graft.passes.library.shard.splits import Ranges
from graft.weights.lazy import LazyWeights


@dataclass
class Shards:
    """made: nodes by weight and part, so that tied weights stay one. cut: weights that have parts now. lazy: weights
    that lie in their file, of which a part is known and not read yet. widened: of these, in blocks no longer."""

    editor: Editor
    lazy: LazyWeights | None = None
    made: dict[tuple[str, int, Ranges], Node] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)  # name → bytes of its parts here
    before: int = 0  # bytes of the weights that were cut
    widened: list[str] = field(default_factory=list)

    def part(self, weight: Node, axis: int, ranges: Ranges, *, before: Node) -> Node:
        """A node that reads the ranges of `axis` of a weight."""
        name = str(weight.target)
        key = name, axis, ranges
        if key not in self.made:
            tensor = self.editor.gm.get_parameter(name).data
            if name not in self.cut:
                self.before += tensor.nbytes
            part = self.lazy_part(name, tensor, axis, ranges) if self.is_lazy(tensor) else take(tensor, axis, ranges)
            self.cut[name] = self.cut.get(name, 0) + part.nbytes
            self.made[key] = self.editor.parameter(name, part, before=before, like=before)
        return self.made[key]

    def is_lazy(self, tensor: Tensor) -> bool:
        return self.lazy is not None and tensor in self.lazy

    def lazy_part(self, name: str, tensor: Tensor, axis: int, ranges: Ranges) -> Tensor:
        assert self.lazy is not None
        part, as_stored = self.lazy.part(tensor, axis, ranges)
        if not as_stored:
            self.widened.append(name)
        return part


def take(tensor: Tensor, axis: int, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """In memory of its own: the whole can be freed."""
    parts = [tensor.narrow(axis, first, last - first) for first, last in ranges]
    return torch.cat(parts, axis) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)
