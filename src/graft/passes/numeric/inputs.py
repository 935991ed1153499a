"""The inputs of one trial: made up from what is recorded, handed out as copies, and compared with them afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from graft.ir.evaluate import fill
from graft.ir.nodes import is_weight, val
from graft.passes.numeric.layouts import RECORDED_LAYOUT, copy_in_layout, lay_out
from graft.passes.numeric.sizes import size_with
from graft.passes.numeric.trials import ORDINARY, NumericTrial

COPIED = 1 << 22  # elements of a weight up to which every run gets a copy of its own; larger ones in the first trial


@dataclass
class PieceWeights:
    """The weights of a piece: the module's own where they are real. On the meta device they are made up by storage,
    so that views of one tensor stay views of one tensor, and so are those in `flat`. Other dtypes are made once."""

    flat: frozenset[int] = frozenset()
    storages: dict[int, Tensor] = field(default_factory=dict)
    converted: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def real(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not tensor.is_meta and storage._cdata not in self.flat:
            return tensor.detach()
        if storage._cdata not in self.storages:
            count = storage.nbytes() // tensor.element_size()
            generator = torch.Generator().manual_seed(count)
            made = fill((count,), tensor.dtype, ORDINARY, generator) if tensor.is_meta else around(tensor, count)
            self.storages[storage._cdata] = made
        return self.storages[storage._cdata].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def in_dtype(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.dtype is dtype:
            return self.real(tensor)
        key = id(tensor), dtype
        if key not in self.converted:  # the tensor is held, so that its id stays its own
            self.converted[key] = tensor, self.real(tensor).to(dtype)
        return self.converted[key][1]


def around(tensor: Tensor, count: int) -> Tensor:
    """Values about the one that the tensor has throughout, with its sign: a variance stays one."""
    value = tensor.detach().reshape(-1)[0]
    spread = torch.rand(count, generator=torch.Generator().manual_seed(count)).to(tensor.device, tensor.dtype)
    return spread - 0.5 if value == 0 else value * (spread + 0.5)


@dataclass
class TrialInputs:
    """retype: the piece's own dtype, and what takes its place. given: values that are not made up."""

    trial: NumericTrial
    weights: PieceWeights
    retype: Mapping[torch.dtype, torch.dtype]
    given: Mapping[Node, Any] = field(default_factory=dict)
    copy_weights: bool = False
    masters: dict[Node, Any] = field(default_factory=dict)
    handed: dict[Node, Any] = field(default_factory=dict)
    handed_weights: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def at(self, node: Node) -> Any:
        self.handed[node] = map_aggregate(self.master(node), copied)
        return self.handed[node]

    def state(self, tensor: Tensor) -> Tensor:
        kept = self.weights.in_dtype(tensor, self.retype.get(tensor.dtype, tensor.dtype))
        if not self.copy_weights and kept.numel() > COPIED:
            return kept
        copy = copy_in_layout(kept)
        self.handed_weights[f"a weight of {tuple(kept.shape)}"] = kept, copy
        return copy

    def master(self, node: Node) -> Any:
        if node not in self.masters:
            generator = torch.Generator().manual_seed(len(self.masters))
            recorded = self.given.get(node, val(node))
            self.masters[node] = map_aggregate(recorded, lambda value: self.made(value, generator, node))
        return self.masters[node]

    def made(self, value: Any, generator: torch.Generator, node: Node) -> Any:
        if isinstance(value, torch.SymInt):
            return size_with(value, node, self.trial.sizes)
        if not isinstance(value, Tensor):
            return value
        dtype = self.retype.get(value.dtype, value.dtype)
        if node in self.given:
            return value.to(dtype)
        sizes = [size_with(size, node, self.trial.sizes) for size in value.shape]
        strides = [size_with(stride, node, self.trial.sizes) for stride in value.stride()]
        device = "cpu" if value.is_meta else value.device
        kind = ORDINARY if is_weight(node) else self.trial.values
        filled = fill(sizes, dtype, kind, generator).to(device)
        if self.trial.layout != RECORDED_LAYOUT and not is_weight(node):
            return lay_out(filled, self.trial.layout)
        if 0 in strides:  # expanded: several elements are one
            return filled
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device).copy_(filled)

    def changed(self, declared: set[Node]) -> str:
        """What the last run wrote although no schema says so; '' where it left all as it was."""
        for node, copy in self.handed.items():
            if node not in declared and not same(copy, self.masters[node]):
                return f"its input %{node.name}"
        return next((name for name, (kept, copy) in self.handed_weights.items() if not same(copy, kept)), "")

    def forget(self) -> None:
        """Before another run."""
        self.handed.clear()
        self.handed_weights.clear()


@dataclass(frozen=True)
class WideInputs:
    """The same values in float64."""

    narrow: TrialInputs

    def at(self, node: Node) -> Any:
        return map_aggregate(self.narrow.master(node), lambda value: widened(value, copy=True))

    def state(self, tensor: Tensor) -> Tensor:
        dtype = self.narrow.retype.get(tensor.dtype, tensor.dtype)
        kept = self.narrow.weights.in_dtype(tensor, dtype)
        if not kept.is_floating_point():
            return copied(kept)
        wide = self.narrow.weights.in_dtype(kept, torch.float64) if dtype is tensor.dtype else kept.double()
        return wide if kept.numel() > COPIED else wide.clone()


def widened(value: Any, *, copy: bool = False) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(torch.float64) if floating else copied(value) if copy else value


def copied(value: Any) -> Any:
    return copy_in_layout(value) if isinstance(value, Tensor) else value


def same(left: Any, right: Any) -> bool:
    """Equal, also where both are not numbers."""
    if isinstance(left, (list, tuple)):
        return all(same(one, other) for one, other in zip(left, right, strict=True))
    if not isinstance(left, Tensor):
        return True
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    unequal = left != right
    return not bool((unequal & ~((left != left) & (right != right))).any())
