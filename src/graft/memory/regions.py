"""Which parts of one storage two views cover: a proof that they do not overlap, or none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch

from graft.ir.nodes import same_sizes, static_int
from graft.ir.storage import storage_id


@dataclass(frozen=True)
class StorageRegion:
    """Elements of one storage: an offset, and for each stride, largest first, how many steps of it."""

    storage: int
    itemsize: int
    offset: int
    steps: tuple[tuple[int, int], ...]  # (stride, size), sizes above 1 alone

    @property
    def end(self) -> int:
        return self.offset + sum(stride * (size - 1) for stride, size in self.steps) + 1


def region_of(tensor: torch.Tensor) -> StorageRegion | None:
    """None where a size, a stride or the offset is symbolic."""
    storage, offset = storage_id(tensor), static_int(tensor.storage_offset())
    sizes, strides = [static_int(s) for s in tensor.shape], [static_int(s) for s in tensor.stride()]
    if storage is None or offset is None:
        return None
    steps = []
    for stride, size in zip(strides, sizes, strict=True):
        if stride is None or size is None or size == 0:
            return None
        if size > 1 and stride > 0:  # a broadcast dim has stride 0 and covers no more elements
            steps.append((stride, size))
    return StorageRegion(storage, tensor.element_size(), offset, tuple(sorted(steps, reverse=True)))


def disjoint(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True when the two are proven to cover different elements of one storage."""
    return apart(region_of(left), region_of(right))


def disjoint_by_address(left: torch.Tensor, right: torch.Tensor) -> bool:
    """The same of real tensors, whose storages may be two over one memory (torch.from_numpy of one array twice)."""
    base = min(tensor.untyped_storage().data_ptr() for tensor in (left, right))
    return apart(region_from(base, left), region_from(base, right))


def region_from(base: int, tensor: torch.Tensor) -> StorageRegion | None:
    """Its elements, counted from an address; None where it does not lie whole elements from there."""
    region = region_of(tensor)
    offset, rest = divmod(tensor.data_ptr() - base, tensor.element_size())
    return None if region is None or rest else replace(region, storage=base, offset=offset)


def apart(a: StorageRegion | None, b: StorageRegion | None) -> bool:
    """The same of regions; None is a region that is not known."""
    if a is None or b is None or a.storage != b.storage or a.itemsize != b.itemsize:
        return False
    return a.end <= b.offset or b.end <= a.offset or apart_on_grid(a, b)


def covers(a: StorageRegion | None, b: StorageRegion | None) -> bool:
    """True when every element of `b` is known to be in `a`: they are equal, or `a` is a stretch without gaps."""
    if a is None or b is None or a.storage != b.storage or a.itemsize != b.itemsize:
        return False
    dense = prod(size for _, size in a.steps) == a.end - a.offset and len({s for s, _ in a.steps}) == len(a.steps)
    return a == b or (dense and a.offset <= b.offset and b.end <= a.end)


def apart_on_grid(a: StorageRegion, b: StorageRegion) -> bool:
    """Reads both as boxes in one grid whose strides divide each other: [b, l, s, h][:, 0] and [:, 1] are apart in l.

    An element's position on such a grid is unique, as the digits of a number are, so boxes that are apart in one dim
    share no element.
    """
    strides = sorted({stride for stride, _ in a.steps + b.steps} | {1}, reverse=True)
    if any(large % small for large, small in pairwise(strides)):
        return False
    boxes = [box(region, strides) for region in (a, b)]
    if boxes[0] is None or boxes[1] is None:
        return False
    return any(p + n <= q or q + m <= p for (p, n), (q, m) in zip(boxes[0], boxes[1], strict=True))


def box(region: StorageRegion, strides: list[int]) -> list[tuple[int, int]] | None:
    """(first place, size) in each dim of the grid, or None when the view wraps around a dim."""
    sizes = dict(region.steps)
    if len(sizes) != len(region.steps):  # two dims of one stride overlap themselves
        return None
    found, rest, room = [], region.offset, None
    for stride in strides:
        position, rest = divmod(rest, stride)
        size = sizes.get(stride, 1)
        if room is not None and position + size > room // stride:
            return None
        found.append((position, size))
        room = stride
    return found


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal sizes, strides and offset, symbolic ones too: every element is at the same offset of its storage."""
    return same_sizes((*a.shape, *a.stride(), a.storage_offset()), (*b.shape, *b.stride(), b.storage_offset()))
