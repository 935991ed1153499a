"""Logits of a part of the vocabulary, on one rank; several are threads or processes, and tested as such."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn


def make(shape: tuple[int, ...], device: str, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
    return randn(shape, device, dtype, generator), 1


def wrong(args: list[Any]) -> list[Any]:
    """Some of a part twice."""
    return [args[0] * 1.1, *args[1:]]


CASES = [
    Case("llama-3 decode", partial(make, (1, 1, 16_032)), 1),
    Case("smollm2 decode 3", partial(make, (1, 3, 24_576)), 1),
]
