"""Shapes of multi-head latent attention in real models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn


def make(
    b: int, s: int, sizes: tuple[int, int, int, int, int], device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Any, ...]:
    """sizes: LatentSizes."""
    h, nope, rope, value, rank = sizes
    q = randn((b, h, s, nope + rope), device, dtype, generator)
    latent, rotated = (randn((b, 1, s, width), device, dtype, generator) for width in (rank, rope))
    weight = randn((h * (nope + value), rank), device, dtype, generator) * rank**-0.5
    return q, latent, rotated, weight.to(dtype), (nope + rope) ** -0.5


CASES = [
    Case("deepseek-v2-lite heads, one sequence", partial(make, 1, 19, (4, 128, 64, 128, 96)), 192),
    Case("rank 40, two sequences", partial(make, 2, 7, (3, 16, 8, 24, 40)), 40),
    Case("one token", partial(make, 3, 1, (4, 16, 8, 16, 16)), 24),
]
