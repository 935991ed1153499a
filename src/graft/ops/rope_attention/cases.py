"""Batches whose queries and keys are yet to be normed and rotated."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from graft.ops.cases import Case, randn
from graft.ops.paged_batches import PLAIN
from graft.ops.paged_batches import make as make_paged


class Turning(NamedTuple):
    """How heads turn. part: of a head that does; wide: angles in float32."""

    part: float = 1.0
    interleaved: bool = False
    norms: str = ""  # of q, k or both: "qk"
    offset: float = 0.0
    cast_last: bool = False
    wide: bool = False


def make(
    new: tuple[int, ...], old: tuple[int, ...], h: int, kv: int, d: int, options: tuple[Any, ...], turning: Turning,
    device: str, dtype: torch.dtype, generator: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    q, k, v, *rest = make_paged(new, old, h, kv, d, options, device, dtype, generator)
    own = torch.Generator().manual_seed(1)
    r = int(turning.part * d)
    angles = torch.rand(1, 1, q.shape[2], r // 2, generator=own) * 6.28
    angles = angles.repeat_interleave(2, dim=-1) if turning.interleaved else angles.repeat(1, 1, 1, 2)
    kind = torch.promote_types(dtype, torch.float32) if turning.wide else dtype
    cos, sin = (t.to(device, kind) for t in (angles.cos(), angles.sin()))
    norms = [1 + randn((d,), device, dtype, own) / 4 if name in turning.norms else None for name in "qk"]
    eps = 1e-6 if turning.norms else 0.0
    how = (turning.interleaved, *norms, eps, turning.offset, turning.cast_last)
    return q, k, v, cos, sin, *rest, *how


HALVES = Turning()
BATCHES = [
    ("llama-3.2-1b decode", ((1,), (147,), 8, 2, 64, PLAIN, HALVES), 148),
    ("llama-3.1-8b decode, 3 sequences", ((1, 1, 1), (299, 0, 16), 8, 2, 128, PLAIN, HALVES), 300),
    ("gpt-oss decode, sinks and window", ((1, 1), (90, 3), 8, 1, 64, (50, None, True), HALVES), 64),
    ("gemma-2 decode, soft cap", ((1,), (40,), 4, 2, 32, (None, 20.0, False), HALVES), 41),
    ("prefill and decode", ((1, 7), (20, 5), 4, 2, 32, PLAIN, HALVES), 32),
    ("qwen3 decode, norms", ((1, 1), (60, 3), 8, 2, 64, PLAIN, Turning(norms="qk")), 64),
    (
        "gemma-3 decode, norms",
        ((1,), (40,), 4, 1, 64, (20, None, False), Turning(norms="qk", offset=1.0, cast_last=True)),
        64,
    ),
    ("one norm, float32 angles", ((1, 1), (17, 30), 4, 2, 48, PLAIN, Turning(norms="k", wide=True)), 48),
    ("stablelm decode, 20 of 80", ((1, 1), (33, 5), 4, 2, 80, PLAIN, Turning(0.25)), 48),
    ("glm-4 decode, interleaved, 32 of 64", ((1, 1), (33, 5), 8, 2, 64, PLAIN, Turning(0.5, True)), 48),
    ("cohere decode, interleaved", ((1,), (33,), 8, 2, 64, PLAIN, Turning(interleaved=True, wide=True)), 48),
    ("norms, 32 of 80, prefill and decode", ((1, 5), (20, 3), 4, 2, 80, PLAIN, Turning(0.4, norms="qk")), 80),
]
CASES = [Case(name, partial(make, *args), reduction) for name, args, reduction in BATCHES]
