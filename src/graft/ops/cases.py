"""What a case is: named real shapes that feed tests, benchmarks and tuning alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """`make(device, dtype, generator)` gives the op's arguments."""

    name: str
    make: Callable[[str, torch.dtype, torch.Generator], tuple[Any, ...]]
    reduction: int  # how many roundings the longest chain or sum has; tolerances grow with its root


def randn(shape: tuple[int, ...], device: str, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(device=device, dtype=dtype)


# One rounding step of the dtype: what a single operation may be off by, relatively.
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def tolerance(dtype: torch.dtype, reduction: int) -> float:
    """Relative and absolute tolerance: 4 units of the dtype times the root of the reduction length in float32.

    Ops accumulate in float32, so for 16-bit dtypes only the final roundings are in the working dtype.
    """
    accumulated = UNIT[torch.float32] * max(reduction, 1) ** 0.5 if dtype is not torch.float64 else 0.0
    return 4 * max(UNIT[dtype], accumulated)
