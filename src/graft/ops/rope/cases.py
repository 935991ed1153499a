"""Shapes of rotary embeddings in real models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn


def make(
    b: int, h: int, s: int, d: int, r: int, wide: bool, device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Any, ...]:
    x = randn((b, s, h, d), device, dtype, generator).transpose(1, 2)  # as it comes from a projection
    angles = randn((b, 1, s, r), "cpu", torch.float32, generator)
    kind = torch.promote_types(dtype, torch.float32) if wide else dtype
    return x, angles.cos().to(device, kind), angles.sin().to(device, kind)


CASES = [
    Case("smollm2-135m decode q", partial(make, 1, 9, 1, 64, 64, False), 1),
    Case("llama-3.2-1b prefill k", partial(make, 1, 8, 17, 64, 64, False), 1),
    Case("batch of three", partial(make, 3, 4, 5, 128, 128, False), 1),
    Case("partial, 32 of 80", partial(make, 2, 4, 3, 80, 32, False), 1),
    Case("olmo-2, float32 angles", partial(make, 1, 16, 3, 128, 128, True), 1),
]
