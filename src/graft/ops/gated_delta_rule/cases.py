"""The gated delta rule in real models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from graft.ops.cases import Case, randn


def operands(
    b: int, s: int, h: int, d_k: int, d_v: int, device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Any, ...]:
    """Keys of length 1, as models have them: with longer ones the recurrence grows without bounds. Large values,
    since queries of length 1 make small results of them."""
    q, k = (randn((b, s, h, d_k), device, dtype, generator) for _ in range(2))
    v = 16 * randn((b, s, h, d_v), device, dtype, generator)
    wide = torch.promote_types(dtype, torch.float32)
    g = -F.softplus(randn((b, s, h), device, wide, generator))
    return q, F.normalize(k, dim=-1), v, g, randn((b, s, h), device, dtype, generator).sigmoid()


def make(
    b: int, s: int, h: int, d_k: int, d_v: int, l2_norm: bool,
    device: str, dtype: torch.dtype, generator: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    return *operands(b, s, h, d_k, d_v, device, dtype, generator), l2_norm


def wrong(args: list[Any]) -> list[Any]:
    """Values that are a little too large."""
    return [*args[:2], args[2] * 1.05, *args[3:]]


CASES = [
    Case("qwen3-next", partial(make, 1, 7, 4, 128, 128, True), 7 * 128),
    Case("two chunks and a token", partial(make, 2, 129, 2, 16, 32, True), 129 * 16),
    Case("keys as they are", partial(make, 1, 64, 2, 16, 16, False), 64 * 16),
]
