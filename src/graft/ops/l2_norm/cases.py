"""Rows that real models scale to unit length."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn


def make(
    shape: tuple[int, ...], eps: float, form: str, device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Any, ...]:
    return randn(shape, device, dtype, generator), eps, form


def wrong(args: list[Any]) -> list[Any]:
    """Rows of another length."""
    x, eps, form = args
    return [x, eps, "sum" if form == "mean" else "mean"]


CASES = [
    Case("qwen3-next keys", partial(make, (1, 7, 4, 128), 1e-6, "sum"), 128),
    Case("llama-4 queries", partial(make, (1, 5, 8, 128), 1e-5, "mean"), 128),
    Case("F.normalize of an embedding", partial(make, (3, 768), 1e-12, "max"), 768),
    Case("odd width, eps outside", partial(make, (2, 3, 37), 1e-3, "plus"), 37),
]
