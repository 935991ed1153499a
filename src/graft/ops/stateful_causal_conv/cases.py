"""Convolutions over batches of packed sequences: prompts, chunks of prompts, decoding rows and mixtures."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn
from graft.ops.packed_states import make_layout, make_state


def make(
    new: tuple[int, ...], old: tuple[int, ...], c: int, k: int, biased: bool, activation: str,
    device: str, dtype: torch.dtype, generator: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    x = randn((1, sum(new), c), device, dtype, generator).transpose(1, 2)
    weight = randn((c, k), device, dtype, generator)
    bias = randn((c,), device, dtype, generator) if biased else None
    state = make_state((c, k - 1), len(new), device, dtype, generator)
    return x, weight, bias, state, *make_layout(new, old, device).values(), activation


def wrong(args: list[Any]) -> list[Any]:
    """Taps in the other order."""
    return [args[0], args[1].flip(1), *args[2:]]


CASES = [
    Case("lfm2 decode", partial(make, (1, 1, 1), (5, 1, 40), 48, 3, False, "none"), 3),
    Case("qwen3-next mixed", partial(make, (1, 1, 6, 2, 9), (7, 2, 0, 33, 1), 64, 4, False, "silu"), 4),
    Case("bias, chunks shorter than the taps", partial(make, (2, 1, 3), (1, 0, 2), 8, 4, True, "none"), 4),
    Case("a sequence without tokens", partial(make, (1, 0, 4), (3, 5, 0), 8, 3, False, "none"), 3),
]
