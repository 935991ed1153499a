"""What recurrent layers keep of each sequence, beside its blocks of keys and values: a slot of fixed size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graft.base.device_memory import CacheSize, cache_size, size_text
from graft.base.errors import CacheMisuse
from graft.engine.kv.tensors import lazy_zeros
from graft.ops.layout import on_host
from graft.ops.packed_states import StateShape

SHARE = 2  # of the memory for caches, one part at most


class StateCache:
    """A slot for each request that runs. Its content is nobody's once it is given back: whoever has it next feeds its
    tokens from the first on, for which the ops take zeros (ops/packed_states.py). padding: one slot more, `nobody`,
    which rows of captured steps without a request write to."""

    def __init__(
        self, shapes: Sequence[StateShape], slots: int, device: torch.device, *, padding: bool = False
    ) -> None:
        self.shapes, self.slots, self.device = tuple(shapes), slots, device
        self.nobody = slots
        self.tell: Callable[[int, int], None] = told_to_nobody  # of copies: rank 0 of several tells the others
        self.free = list(reversed(range(slots)))
        make: Any = lazy_zeros if device.type == "cpu" else self.zeros
        self.tensors: list[Tensor] = [make((slots + padding, *one.sizes), one.dtype) for one in shapes]

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        return bytes_per_slot(self.shapes) * self.slots

    def take(self) -> int:
        if not self.free:
            raise CacheMisuse(f"all {self.slots} slots of recurrent states are in use; the scheduler admits no more")
        return self.free.pop()

    def give_back(self, slot: int) -> None:
        if slot in self.free or not 0 <= slot < self.slots:
            raise CacheMisuse(f"slot {slot} of recurrent states is not in use")
        self.free.append(slot)

    def copy(self, source: int, target: int) -> None:
        self.tell(source, target)
        for tensor in self.tensors:
            tensor[target] = tensor[source]

    def inputs(self, slots: Sequence[int]) -> tuple[Tensor, ...]:
        """As the graph takes them, behind the key-value caches: the slot of each sequence, and all states."""
        return self.beside(on_host(list(slots), self.device).to(self.device, non_blocking=True))

    def beside(self, slots: Tensor) -> tuple[Tensor, ...]:
        """The same with slots [n] that are on the device."""
        return slots, *self.tensors

    def aside(self, count: int) -> tuple[Tensor, ...]:
        """The same for so many sequences of nobody's, on states of their own."""
        return StateCache(self.shapes, count, self.device).inputs(range(count))


def told_to_nobody(source: int, target: int) -> None:
    """One rank has nobody to tell."""


def bytes_per_slot(shapes: Sequence[StateShape]) -> int:
    return sum(one.nbytes for one in shapes)


def slots_within(shapes: Sequence[StateShape], most: int, device: torch.device, asked: int | str | None) -> CacheSize:
    """One for each of `most` requests, or as many as half of the memory for caches holds."""
    found = cache_size(SHARE * bytes_per_slot(shapes), most, device, asked)
    return CacheSize(found.blocks, found.bytes // SHARE, found.reason)


def states_note(states: StateCache, wanted: int) -> str:
    """For the report."""
    size = size_text(bytes_per_slot(states.shapes))
    told = f"recurrent states: {states.slots} slots of {size}, {size_text(states.nbytes)}, one a request that runs"
    fewer = f" (not {wanted}: more would take over half of the caches' memory)" if states.slots < wanted else ""
    return f"{told}{fewer}; prefix reuse is off, since a state is known at the end of a sequence alone"
