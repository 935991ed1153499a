"""Memory with marks around it: a kernel that reads or writes past its tensors, or leaves a part unwritten, shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MARGIN = 4096  # elements on both sides: a tile of Triton's elementwise kernels is 1024
MARK = 12345.0  # every second one, between NaN: a NaN that is written shows, too


class GuardedMemory(TorchFunctionMode):
    """While it is on, floats of torch.empty are NaN, with marks on both sides of them."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[tuple[Tensor, int]] = []  # the whole, and how much of it is in use

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is not torch.empty or not made.is_floating_point():
            return made
        return self.around(made.shape, made.dtype, made.device)

    def around(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        count = math.prod(shape)
        whole = torch.full((count + 2 * MARGIN,), float("nan"), dtype=dtype, device=device)
        for part in (whole[:MARGIN], whole[MARGIN + count :]):
            part[::2] = MARK
        self.buffers.append((whole, count))
        return whole[MARGIN : MARGIN + count].view(*shape)

    def placed(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A copy there with its strides, with marks around it, and between its elements where those leave room."""
        reach = (
            1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
        )
        room = self.around((reach,), tensor.dtype, device)
        copy = room.as_strided(tensor.shape, tensor.stride(), room.storage_offset())
        # an expanded dim has one element
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
        copy[once].copy_(tensor[once])
        return copy

    def problem(self) -> str:
        """'' where every mark is there."""
        for whole, count in self.buffers:
            for side, part in (("before", whole[:MARGIN]), ("behind", whole[MARGIN + count :])):
                kept = torch.full_like(part[::2], MARK)
                lost = int((part[::2] != kept).sum()) + int((~part[1::2].isnan()).sum())
                if lost:
                    return f"{lost} numbers {side} a tensor were written over"
        return ""
