"""Where a tensor lies in memory: which storage it is in, who else is there, and how far it reaches."""

from __future__ import annotations

from typing import Any

import torch


def storage_id(tensor: torch.Tensor) -> int | None:
    """Equal for tensors of one storage; None where a tensor has none (sparse, functorch wrappers)."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def share_storage(left: torch.Tensor, right: torch.Tensor) -> bool:
    storage = storage_id(left)
    return storage is not None and storage == storage_id(right)


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Two names with one of these are one tensor."""
    if tensor.layout is not torch.strided:
        return (id(tensor),)  # sparse: several tensors make one, and it has no strides
    location = storage_id(tensor), tensor.storage_offset()
    return (*location, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


def extent(tensor: torch.Tensor) -> int:
    """How many elements of memory lie between the first and the last, gaps and both ends included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def plain_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers as they lie in memory, without the bits that say to conjugate or negate when reading."""
    tensor = tensor.conj() if tensor.is_conj() else tensor
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def with_bits(tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    """A view of the same memory that is read with these bits; `tensor` has none."""
    tensor = tensor.conj() if conj else tensor
    return torch._neg_view(tensor) if neg else tensor
