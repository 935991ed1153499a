"""Layouts to try: a kernel may take strides for granted that the next caller's tensors do not have."""

from __future__ import annotations

from torch import Tensor

RECORDED_LAYOUT = "recorded"
# transposed: the last two dims lie the other way round in memory. sliced: every second element of rows that are
# longer. offset: contiguous, and not where its storage begins. expanded: all of the first dim is one memory.
LAYOUTS = ("transposed", "sliced", "offset", "expanded")
OFFSET = 3  # elements: neither 16 bytes nor a cache line


def lay_out(value: Tensor, layout: str) -> Tensor:
    """The same values (of an expanded tensor: those of its first row) in another layout."""
    if not value.dim() or not value.numel():
        return value
    if layout == "transposed":
        return value.transpose(-1, -2).contiguous().transpose(-1, -2) if value.dim() > 1 else value
    if layout == "sliced":
        wide = value.new_zeros((*value.shape[:-1], 2 * value.shape[-1] + 1))
        wide[..., 1::2] = value
        return wide[..., 1::2]
    if layout == "offset":
        flat = value.new_zeros(value.numel() + OFFSET)
        flat[OFFSET:] = value.reshape(-1)
        return flat[OFFSET:].view(value.shape)
    if layout == "expanded" and value.dim() > 1:
        return value[:1].contiguous().expand(value.shape)
    return value


def copy_in_layout(value: Tensor) -> Tensor:
    """A copy with the same sizes, strides and offset, so that what a call writes is seen in the copy alone."""
    overlapping = any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True))
    if overlapping:
        one = value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.stride())]
        return one.clone().expand(value.shape)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    offset = value.storage_offset()
    memory = value.new_empty(extent + offset if value.numel() else 0)
    return memory.as_strided(value.shape, value.stride(), offset if value.numel() else 0).copy_(value)
