"""What is looked at before a compiled module runs: the memory of the inputs that it is going to write."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graft.errors import ReadOnlyInput, SharedMemoryError
from graft.state.regions import disjoint


def check_memory(
    values: Sequence[object], names: Sequence[str], written: Sequence[int], state: Sequence[torch.Tensor]
) -> None:
    """Raises for a written input that cannot be written, or that shares memory with another input or with `state`."""
    owners: dict[int, list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            owners.setdefault(storage(value), []).append(index)
    kept = {storage(tensor): tensor for tensor in state}
    for index in written:
        tensor = values[index]
        assert isinstance(tensor, torch.Tensor)
        problem = write_problem(tensor)
        if problem:
            raise ReadOnlyInput(names[index], problem)
        for other in owners[storage(tensor)]:
            if other != index and overlap(tensor, values[other]):
                raise SharedMemoryError(names[index], names[other])
        if storage(tensor) in kept and tensor.numel():
            raise SharedMemoryError(names[index], "a buffer of the module")


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def write_problem(tensor: torch.Tensor) -> str | None:
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return "is expanded: several of its elements are one place in memory"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in torch.inference_mode(), which forbids writes outside of it"
    return None


def overlap(left: torch.Tensor, right: object) -> bool:
    return isinstance(right, torch.Tensor) and bool(left.numel() and right.numel()) and not disjoint(left, right)
