"""Shapes of queries, keys and values on their way into the cache in real models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn


def make(
    tokens: int, h: int, kv: int, d: int, r: int, options: tuple[Any, ...],
    device: str, dtype: torch.dtype, generator: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    """q, k and v as views of the merged projection. options: interleaved, norm, offset, cast_last, wide."""
    interleaved, norm, offset, cast_last, wide = options
    block, blocks = 16, 2 + 2 * tokens // 16
    row = randn((1, tokens, (h + 2 * kv) * d), device, dtype, generator)
    cuts = row.split([h * d, kv * d, kv * d], dim=-1)
    q, k, v = (t.unflatten(-1, (-1, d)).transpose(1, 2) for t in cuts)
    angles = randn((1, 1, tokens, r // 2), "cpu", torch.float32, generator)
    angles = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
    kind = torch.promote_types(dtype, torch.float32) if wide else dtype
    cos, sin = angles.cos().to(device, kind), angles.sin().to(device, kind)
    caches = [randn((blocks, block, kv, d), device, dtype, generator) for _ in range(2)]
    slot_mapping = torch.randperm(blocks * block, generator=generator)[:tokens].to(device)
    norms = [randn((d,), device, dtype, generator) if norm else None for _ in range(2)]
    return q, k, v, cos, sin, *caches, slot_mapping, interleaved, *norms, 1e-6 if norm else 0.0, offset, cast_last


PLAIN = (False, False, 0.0, False, False)
CASES = [
    Case("llama-3.1-8b decode", partial(make, 1, 32, 8, 128, 128, PLAIN), 1),
    Case("llama-3.2-1b decode, 2 sequences", partial(make, 2, 32, 8, 64, 64, PLAIN), 1),
    Case("smollm2-135m, 7 tokens", partial(make, 7, 9, 3, 64, 64, PLAIN), 1),
    Case("phi-3 head size 96", partial(make, 3, 4, 4, 96, 96, PLAIN), 1),
    Case("stablelm, 20 of 80", partial(make, 3, 4, 2, 80, 20, PLAIN), 1),
    Case("olmo-2, float32 angles", partial(make, 2, 4, 4, 128, 128, (False, False, 0.0, False, True)), 1),
    Case("cohere interleaved", partial(make, 4, 8, 2, 128, 128, (True, False, 0.0, False, True)), 1),
    Case("glm-4 interleaved, 64 of 128", partial(make, 4, 8, 2, 128, 64, (True, False, 0.0, False, False)), 1),
    Case("qwen3-8b decode, norms", partial(make, 1, 32, 8, 128, 128, (False, True, 0.0, False, False)), 128),
    Case("norms, 33 tokens", partial(make, 33, 24, 8, 32, 32, (False, True, 0.0, False, False)), 32),
    Case("gemma-3-1b, norms", partial(make, 3, 4, 1, 256, 256, (False, True, 1.0, True, False)), 256),
    Case("norms, 32 of 80", partial(make, 3, 4, 2, 80, 32, (False, True, 0.0, False, False)), 80),
]
