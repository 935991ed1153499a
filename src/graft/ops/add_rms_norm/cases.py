"""Shapes of add + RMSNorm in real models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn


def make(
    shape: tuple[int, ...], eps: float, offset: float, cast_last: bool, wide: bool,
    device: str, dtype: torch.dtype, generator: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    x, residual = (randn(shape, device, dtype, generator) for _ in range(2))
    return x, residual, randn(shape[-1:], device, dtype, generator), eps, offset, cast_last, wide


CASES = [
    Case("smollm2-135m decode", partial(make, (1, 1, 576), 1e-5, 0.0, False, False), 576),
    Case("llama-3.2-1b prefill 32", partial(make, (1, 32, 2048), 1e-5, 0.0, False, False), 2048),
    Case("gemma-2 offset", partial(make, (2, 5, 2304), 1e-6, 1.0, True, False), 2304),
    Case("odd width", partial(make, (3, 37), 1e-6, 0.0, False, False), 37),
    Case("vllm, normed before it is rounded", partial(make, (7, 2048), 1e-6, 0.0, False, True), 2048),
    Case("vllm gemma, normed before it is rounded", partial(make, (5, 37), 1e-6, 1.0, True, True), 37),
]
