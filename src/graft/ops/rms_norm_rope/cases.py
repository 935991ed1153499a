"""Shapes of normed and turned queries and keys in real models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn
from graft.ops.rope.cases import make as make_rope
from graft.ops.rope.cases import make_interleaved, make_packed


def make(
    b: int, h: int, s: int, d: int, r: int, offset: float, cast_last: bool,
    device: str, dtype: torch.dtype, generator: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    x, cos, sin = make_rope(b, h, s, d, r, False, device, dtype, generator)
    return x, randn((d,), device, dtype, generator), cos, sin, 1e-6, offset, cast_last


def make_pairs(
    b: int, h: int, s: int, d: int, r: int, device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Any, ...]:
    """x [b, s, h, d], float32 angles, in pairs."""
    x, cos, sin, _ = make_interleaved(b, h, s, d, r, True, True, device, dtype, generator)
    return x, randn((d,), device, dtype, generator), cos, sin, 1e-5, 0.0, False, True


def make_tokens(
    t: int, h: int, d: int, r: int, interleaved: bool, device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Any, ...]:
    """Packed tokens, x [t, h, d]."""
    x, cos, sin, _ = make_packed(t, h, d, r, interleaved, device, dtype, generator)
    return x, randn((d,), device, dtype, generator), cos, sin, 1e-6, 0.0, False, interleaved


CASES = [
    Case("qwen3-0.6b decode q", partial(make, 1, 16, 1, 128, 128, 0.0, False), 128),
    Case("qwen3-8b decode q, 4 sequences", partial(make, 1, 32, 4, 128, 128, 0.0, False), 128),
    Case("qwen3-8b prefill k", partial(make, 1, 8, 17, 128, 128, 0.0, False), 128),
    Case("gemma-3-1b k", partial(make, 2, 1, 5, 256, 256, 1.0, True), 256),
    Case("partial, 64 of 128", partial(make, 2, 4, 3, 128, 64, 0.0, False), 128),
    Case("interleaved, heads last, float32 angles", partial(make_pairs, 2, 8, 3, 128, 128), 128),
    Case("vllm qwen3, packed tokens", partial(make_tokens, 7, 4, 128, 128, False), 128),
    Case("packed tokens, interleaved, 64 of 128", partial(make_tokens, 5, 2, 128, 64, True), 128),
]
