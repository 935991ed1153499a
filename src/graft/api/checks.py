"""What is looked at before a compiled module runs: the memory of the inputs that it is going to write."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from graft.backends.buffers import elements_are_apart
from graft.base.errors import ReadOnlyInput, SharedMemoryError
from graft.memory.regions import disjoint_by_address

Owned = tuple[int | None, tuple[int, int]]  # an input, or None for state, and the addresses of its storage


class MemoryCheck:
    """Raises for a written input that cannot be written, or that shares memory with another input or with state.

    Caches are the same tensors from call to call. So what was found about them is kept, and a call that brings the
    same ones only looks whether its other inputs lie in their memory: 1 µs an input instead of 3.
    """

    def __init__(self, names: Sequence[str], written: Sequence[int], state: Sequence[torch.Tensor]) -> None:
        self.names, self.written, self.state = names, written, state
        self.others = [index for index in range(len(names)) if index not in set(written)]
        self.seen: tuple[Any, ...] = ()
        self.ranges: list[tuple[int, int]] = []  # addresses of what the known caches are in

    def __call__(self, values: Sequence[Any]) -> None:
        caches = tuple(layout(values[index]) for index in self.written)
        if caches == self.seen and self.apart(values):
            return
        self.seen = ()
        check_memory(values, self.names, self.written, self.state)
        self.seen = caches
        self.ranges = [storage_range(values[index]) for index in self.written]

    def apart(self, values: Sequence[Any]) -> bool:
        ranges = [storage_range(v) for i in self.others if isinstance(v := values[i], torch.Tensor)]
        return not any(meet(known, found) for found in ranges for known in self.ranges)


class StateCheck:
    """Raises for an input in the memory of a buffer that the graph writes: its reads of the one and its writes of the
    other are in no order to each other. 0.5 µs an input."""

    def __init__(self, names: Sequence[str], written: Mapping[str, torch.Tensor]) -> None:
        self.names, self.written = names, written
        self.addresses: list[int] = []
        self.ranges: list[tuple[int, int, str]] = []  # sorted: the storage of each buffer, and its name

    def __call__(self, values: Sequence[Any]) -> None:
        addresses = [tensor.data_ptr() for tensor in self.written.values()]
        if addresses != self.addresses:
            self.addresses = addresses
            self.ranges = sorted((*storage_range(tensor), name) for name, tensor in self.written.items())
        for index, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                for name in self.near(storage_range(value)):
                    if overlap(value, self.written[name]):
                        raise SharedMemoryError(f"the buffer {name}", self.names[index])

    def near(self, memory: tuple[int, int]) -> Iterator[str]:
        """The buffers of which a storage holds some of these addresses: storages lie apart, or are one."""
        at = bisect_left(self.ranges, (memory[1], 0, "")) - 1
        while at >= 0 and meet(memory, self.ranges[at][:2]):
            yield self.ranges[at][2]
            at -= 1


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    inference = tensor.is_inference() and not torch.is_inference_mode_enabled()
    return tensor.data_ptr(), tensor.shape, tensor.stride(), inference


def storage_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of its storage's first byte, and of the one after its last; (0, 0) where it has no storage.

    Addresses, as two storages may lie over the same bytes: torch.from_numpy of one array twice, DLPack.
    """
    if tensor.layout is not torch.strided:
        return 0, 0
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return (start, start + storage.nbytes()) if start else (0, 0)


def meet(left: tuple[int, int], right: tuple[int, int]) -> bool:
    return left[0] < right[1] and right[0] < left[1]


def check_memory(
    values: Sequence[Any], names: Sequence[str], written: Sequence[int], state: Sequence[torch.Tensor]
) -> None:
    ranges = {index: storage_range(value) for index, value in enumerate(values) if isinstance(value, torch.Tensor)}
    groups = ranges_that_meet([*ranges.items(), *((None, storage_range(tensor)) for tensor in state)])
    for index in written:
        tensor, own = values[index], ranges[index]
        problem = write_problem(tensor)
        if problem:
            raise ReadOnlyInput(names[index], problem)
        near = [(other, found) for other, found in groups.get(own, ()) if meet(own, found)]
        for other, _ in near:
            if other is not None and other != index and overlap(tensor, values[other]):
                raise SharedMemoryError(names[index], names[other])
        if tensor.numel() and any(other is None for other, _ in near):
            raise SharedMemoryError(names[index], "a weight or buffer of the module")


def ranges_that_meet(found: Sequence[Owned]) -> dict[tuple[int, int], list[Owned]]:
    """Range → all that lie in one stretch of memory with it, in the order of `found`; one sort, not every pair."""
    groups: dict[tuple[int, int], list[Owned]] = {}
    members: list[int] = []
    reach = 0
    for at in [*sorted(range(len(found)), key=lambda i: found[i][1]), None]:
        if at is None or found[at][1][0] >= reach:
            group = [found[member] for member in sorted(members)]
            groups.update(dict.fromkeys((memory for _, memory in group), group))
            members = []
        if at is not None:
            members.append(at)
            reach = max(reach, found[at][1][1])
    return groups


def write_problem(tensor: torch.Tensor) -> str | None:
    if not elements_are_apart(tensor):
        return "is expanded or overlaps itself: several of its elements share one address"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in torch.inference_mode(), which forbids writes outside of it"
    return None


def overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool(left.numel() and right.numel()) and not disjoint_by_address(left, right)
