"""Batches of sequences over a paged cache of latent rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case
from graft.ops.latent_attention.cases import make as make_latent
from graft.ops.paged_batches import PLAIN
from graft.ops.paged_batches import make as make_paged


def make(
    new: tuple[int, ...], old: tuple[int, ...], sizes: tuple[int, int, int, int, int],
    device: str, dtype: torch.dtype, generator: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    _, _, rope, _, rank = sizes
    *own, scale = make_latent(1, sum(new), sizes, device, dtype, generator)
    _, _, _, cache, _, *layout, _, _, _, _ = make_paged(new, old, 1, 1, rank + rope, PLAIN, device, dtype, generator)
    return *own, cache, *layout, scale


TINY, LITE = (4, 16, 8, 16, 16), (4, 128, 64, 128, 96)
BATCHES = [
    ("decode", ((1,), (40,), TINY), 24),
    ("decode, batch of three, rank 40", ((1, 1, 1), (5, 33, 70), (3, 16, 8, 24, 40)), 70),
    ("prefill of two", ((7, 18), (0, 0), TINY), 24),
    ("mixed: chunk far into a context, decode, prefill", ((3, 1, 9), (90, 17, 0), TINY), 40),
    ("long chunk behind a short context", ((40,), (6,), TINY), 46),
    ("decode, contexts of several parts", ((1, 1), (299, 130), TINY), 300),
    ("deepseek-v2-lite heads: decode beside a prompt", ((1, 5), (33, 0), LITE), 192),
]
CASES = [Case(name, partial(make, *args), reduction) for name, args, reduction in BATCHES]
