"""Vocabularies of real models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn


def make(rows: int, vocab: int, device: str, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
    return (randn((rows, vocab), device, dtype, generator),)


def make_odd(rows: int, vocab: int, device: str, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
    """Few different values, so that the largest comes more than once; a row of NaN, one of -inf, one with an inf."""
    logits = torch.randint(-3, 4, (rows, vocab), generator=generator).to(torch.float32)
    logits[1, vocab // 2] = float("nan")
    logits[2] = -float("inf")
    logits[3, vocab - 1] = float("inf")
    return (logits.to(device=device, dtype=dtype),)


CASES = [
    Case("llama-3 decode", partial(make, 1, 128_256), 1),
    Case("smollm2 decode 3", partial(make, 3, 49_152), 1),
    Case("gemma decode 9", partial(make, 9, 5_001), 1),
    Case("ties and no numbers", partial(make_odd, 6, 1_500), 1),
    Case("smaller than a piece", partial(make, 2, 37), 1),
]
