"""Shapes of attention in real models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn


def make(
    b: int, h: int, kv: int, s: int, d: int, options: tuple[Any, ...],
    device: str, dtype: torch.dtype, generator: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    q = randn((b, h, s, d), device, dtype, generator)
    k, v = (randn((b, kv, s, d), device, dtype, generator) for _ in range(2))
    return q, k, v, None, d**-0.5, True, *options


CASES = [
    Case("smollm2-135m prefill", partial(make, 1, 9, 3, 19, 64, (None, None, None)), 64),
    Case("mistral sliding window", partial(make, 2, 8, 2, 23, 32, (7, None, None)), 32),
    Case("one token", partial(make, 3, 4, 4, 1, 64, (None, None, None)), 64),
]
