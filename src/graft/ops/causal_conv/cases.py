"""Convolutions of recurrent layers in real models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn


def make(
    b: int, c: int, s: int, k: int, biased: bool, activation: str,
    device: str, dtype: torch.dtype, generator: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    """x as it comes: channels last, transposed."""
    x = randn((b, s, c), device, dtype, generator).transpose(1, 2)
    weight = randn((c, k), device, dtype, generator)
    return x, weight, randn((c,), device, dtype, generator) if biased else None, activation


def wrong(args: list[Any]) -> list[Any]:
    """The taps in the other order: a convolution and not a correlation."""
    x, weight, bias, activation = args
    return [x, weight.flip(1), bias, activation]


CASES = [
    Case("lfm2 short convolution", partial(make, 2, 48, 11, 3, False, "none"), 3),
    Case("qwen3-next, silu", partial(make, 1, 64, 9, 4, False, "silu"), 4),
    Case("bias, fewer tokens than taps", partial(make, 3, 8, 2, 4, True, "none"), 4),
]
