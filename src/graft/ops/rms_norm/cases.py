"""Shapes of RMSNorm in real models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn


def make(
    shape: tuple[int, ...], eps: float, offset: float, cast_last: bool,
    device: str, dtype: torch.dtype, generator: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    return (
        randn(shape, device, dtype, generator),
        randn(shape[-1:], device, dtype, generator),
        eps,
        offset,
        cast_last,
    )


def make_wide(
    shape: tuple[int, ...], eps: float, device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Any, ...]:
    """A row that comes in float32 and is rounded to the working dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    return randn(shape, device, wide, generator), randn(shape[-1:], device, dtype, generator), eps, 0.0, False, dtype


def make_added(
    shape: tuple[int, ...], offset: float, device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Any, ...]:
    """A norm behind a block, and the residual that it is added to."""
    return *make(shape, 1e-6, offset, True, device, dtype, generator), None, randn(shape, device, dtype, generator)


CASES = [
    Case("smollm2-135m decode", partial(make, (1, 1, 576), 1e-5, 0.0, False), 576),
    Case("llama-3.2-1b prefill 32", partial(make, (1, 32, 2048), 1e-5, 0.0, False), 2048),
    Case("qwen3 q-norm", partial(make, (1, 16, 7, 128), 1e-6, 0.0, False), 128),
    Case("gemma-2 offset", partial(make, (2, 5, 2304), 1e-6, 1.0, True), 2304),
    Case("olmo-2 cast last", partial(make, (1, 3, 2048), 1e-6, 0.0, True), 2048),
    Case("gemma-2 added to a residual", partial(make_added, (1, 3, 2304), 1.0), 2304),
    Case("olmo-2 added to a residual, odd width", partial(make_added, (2, 1, 37), 0.0), 37),
    Case("odd width", partial(make, (3, 37), 1e-6, 0.0, False), 37),
    Case("mamba-2 gated", partial(make_wide, (1, 5, 1536), 1e-5), 1536),
]
