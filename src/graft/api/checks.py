"""What is looked at before a compiled module runs: the memory of the inputs that it is going to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graft.backends.buffers import elements_are_apart
from graft.base.errors import ReadOnlyInput, ReplacedBuffer, SharedMemoryError
from graft.ir.storage import storage_id
from graft.memory.regions import disjoint


class BufferCheck:
    """Raises when a buffer of the module is another tensor than the one that the lowered graph is bound to."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.known = [
            (part._buffers, leaf, f"{path}.{leaf}" if path else leaf, tensor)
            for path, part in module.named_modules()
            for leaf, tensor in part._buffers.items()
        ]

    def __call__(self) -> None:
        for buffers, leaf, name, tensor in self.known:
            if buffers.get(leaf) is not tensor:
                raise ReplacedBuffer(name)


class MemoryCheck:
    """Raises for a written input that cannot be written, or that shares memory with another input or with state.

    Caches are the same tensors from call to call. So what was found about them is kept, and a call that brings the
    same ones only looks whether its other inputs lie in their memory: 0.2 µs an input instead of 3.
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
        pointers = [v.data_ptr() for i in self.others if isinstance(v := values[i], torch.Tensor)]
        return not any(low <= pointer < high for pointer in pointers for low, high in self.ranges)


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    inference = tensor.is_inference() and not torch.is_inference_mode_enabled()
    return tensor.data_ptr(), tensor.shape, tensor.stride(), inference


def storage_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of its storage's first byte, and of the one after its last."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def check_memory(
    values: Sequence[Any], names: Sequence[str], written: Sequence[int], state: Sequence[torch.Tensor]
) -> None:
    owners: dict[int | None, list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            owners.setdefault(storage_id(value), []).append(index)
    kept = {storage_id(tensor) for tensor in state}
    for index in written:
        tensor = values[index]
        problem = write_problem(tensor)
        if problem:
            raise ReadOnlyInput(names[index], problem)
        for other in owners[storage_id(tensor)]:
            if other != index and overlap(tensor, values[other]):
                raise SharedMemoryError(names[index], names[other])
        if storage_id(tensor) in kept and tensor.numel():
            raise SharedMemoryError(names[index], "a buffer of the module")


def write_problem(tensor: torch.Tensor) -> str | None:
    if not elements_are_apart(tensor):
        return "is expanded or overlaps itself: several of its elements share one address"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in torch.inference_mode(), which forbids writes outside of it"
    return None


def overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool(left.numel() and right.numel()) and not disjoint(left, right)
