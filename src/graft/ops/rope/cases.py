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


def make_interleaved(
    b: int, h: int, s: int, d: int, r: int, wide: bool, heads_last: bool,
    device: str, dtype: torch.dtype, generator: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    """Each angle stands twice, side by side; `heads_last`: x is [b, s, h, d] and cos [b, s, 1, r]."""
    x = randn((b, s, h, d), device, dtype, generator)
    angles = randn((b, s, 1, r // 2), "cpu", torch.float32, generator).repeat_interleave(2, dim=-1)
    if not heads_last:
        x, angles = x.transpose(1, 2), angles.transpose(1, 2)
    kind = torch.promote_types(dtype, torch.float32) if wide else dtype
    return x, angles.cos().to(device, kind), angles.sin().to(device, kind), True


def make_packed(
    t: int, h: int, d: int, r: int, interleaved: bool, device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Any, ...]:
    """Tokens of many sequences in one row, as vLLM lays them out: x is [t, h, d], cos [t, 1, r]."""
    x = randn((t, 3 * h, d), device, dtype, generator)[:, h : 2 * h]  # a slice of a merged projection
    angles = randn((t, 1, r // 2), "cpu", torch.float32, generator)
    angles = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
    return x, angles.cos().to(device, dtype), angles.sin().to(device, dtype), interleaved


CASES = [
    Case("smollm2-135m decode q", partial(make, 1, 9, 1, 64, 64, False), 1),
    Case("llama-3.2-1b prefill k", partial(make, 1, 8, 17, 64, 64, False), 1),
    Case("batch of three", partial(make, 3, 4, 5, 128, 128, False), 1),
    Case("partial, 32 of 80", partial(make, 2, 4, 3, 80, 32, False), 1),
    Case("olmo-2, float32 angles", partial(make, 1, 16, 3, 128, 128, True), 1),
    Case("cohere interleaved, float32 angles", partial(make_interleaved, 2, 8, 5, 128, 128, True, False), 1),
    Case("glm-4 interleaved, 64 of 128", partial(make_interleaved, 1, 32, 3, 128, 64, False, False), 1),
    Case("gpt-j interleaved, heads last, 64 of 256", partial(make_interleaved, 2, 16, 3, 256, 64, False, True), 1),
    Case("vllm packed tokens", partial(make_packed, 7, 4, 64, 64, False), 1),
    Case("vllm packed tokens, interleaved, 32 of 128", partial(make_packed, 5, 2, 128, 32, True), 1),
]
