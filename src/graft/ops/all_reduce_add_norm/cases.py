"""What the output projection of attention or an MLP gives, and the norm behind it; on one rank, as in all_reduce."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn


def make(
    shape: tuple[int, ...], offset: float, cast_last: bool, wide: bool, device: str, dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    x, residual = (randn(shape, device, dtype, generator) for _ in range(2))
    return x, residual, randn(shape[-1:], device, dtype, generator), 1, 1e-5, offset, cast_last, wide


def wrong(args: list[Any]) -> list[Any]:
    """Some of the residual twice."""
    return [args[0], args[1] * 1.1, *args[2:]]


CASES = [
    Case("llama-3 decode", partial(make, (1, 1, 4096), 0.0, False, False), 4096),
    Case("gemma, offset", partial(make, (1, 5, 2304), 1.0, True, False), 2304),
    Case("more rows than lanes", partial(make, (1, 70, 37), 0.0, False, False), 37),
    Case("normed before it is rounded", partial(make, (3, 64), 0.0, False, True), 64),
]
