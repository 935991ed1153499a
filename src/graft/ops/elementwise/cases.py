"""Elementwise chains of real models, with shapes they have there."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn

GELU_NEW = (
    "t0 = mul(i0, i0); t1 = mul(t0, i0); t2 = mul(t1, 0.044715); t3 = add(i0, t2); t4 = mul(t3, 0.7978845608028654);"
    " t5 = tanh(t4); t6 = add(t5, 1.0); t7 = mul(i0, 0.5); t8 = mul(t7, t6); return t8"
)
SOFT_CAP = "t0 = div(i0, 30.0); t1 = tanh(t0); t2 = mul(t1, 30.0); return t2"
SCALE_AND_SHIFT = "t0 = add(i1, 1.0); t1 = mul(i0, t0); t2 = add(t1, i2); return t2, t1"


def make(
    program: str, shapes: tuple[tuple[int, ...], ...], device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Any, ...]:
    return [randn(shape, device, dtype, generator) for shape in shapes], program


def turned(program: str, shape: tuple[int, ...], device: str, dtype: torch.dtype, generator: torch.Generator) -> Any:
    """The last two dims swapped: read across the rows."""
    swapped = (*shape[:-2], shape[-1], shape[-2])
    return [randn(swapped, device, dtype, generator).transpose(-1, -2)], program


CASES = [
    Case("gpt2 gelu_new decode", partial(make, GELU_NEW, ((1, 1, 3072),)), 16),
    Case("gpt2 gelu_new prefill 16", partial(make, GELU_NEW, ((1, 16, 3072),)), 16),
    Case("vector over rows, two results", partial(make, SCALE_AND_SHIFT, ((2, 5, 67), (67,), (2, 5, 1))), 4),
    Case("gemma-2 soft cap, transposed", partial(turned, SOFT_CAP, (2, 37, 1025)), 8),
]
