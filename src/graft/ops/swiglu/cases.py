"""Shapes of gated activations in real models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn


def make(
    shape: tuple[int, ...],
    activation: str,
    merged: bool,
    upcast: bool,
    device: str,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[Any, ...]:
    if merged:
        both = randn((*shape[:-1], 2 * shape[-1]), device, dtype, generator)
        return both[..., : shape[-1]], both[..., shape[-1] :], activation, upcast
    return randn(shape, device, dtype, generator), randn(shape, device, dtype, generator), activation, upcast


CASES = [
    Case("smollm2-135m decode", partial(make, (1, 1, 1536), "silu", True, False), 4),
    Case("llama-3.2-1b prefill 16", partial(make, (1, 16, 8192), "silu", False, False), 4),
    Case("gemma-2 gelu tanh", partial(make, (1, 3, 9216), "gelu_tanh", True, False), 16),
    Case("gelu erf, odd width", partial(make, (2, 3, 77), "gelu", False, False), 16),
    Case("float32 inside", partial(make, (1, 3, 1536), "silu", True, True), 4),
]
