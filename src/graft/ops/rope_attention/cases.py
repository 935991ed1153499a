"""Batches whose queries and keys are yet to be rotated."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case
from graft.ops.paged_batches import PLAIN
from graft.ops.paged_batches import make as make_paged


def make(*args: Any) -> tuple[Any, ...]:
    q, k, v, *rest = make_paged(*args)
    generator = torch.Generator().manual_seed(1)
    angles = torch.rand(1, 1, q.shape[2], q.shape[3] // 2, generator=generator) * 6.28
    cos, sin = (t.repeat(1, 1, 1, 2).to(q) for t in (angles.cos(), angles.sin()))
    return q, k, v, cos, sin, *rest


BATCHES = [
    ("llama-3.2-1b decode", ((1,), (147,), 8, 2, 64, PLAIN), 148),
    ("llama-3.1-8b decode, 3 sequences", ((1, 1, 1), (299, 0, 16), 8, 2, 128, PLAIN), 300),
    ("gpt-oss decode, sinks and window", ((1, 1), (90, 3), 8, 1, 64, (50, None, True)), 64),
    ("gemma-2 decode, soft cap", ((1,), (40,), 4, 2, 32, (None, 20.0, False)), 41),
    ("prefill and decode", ((1, 7), (20, 5), 4, 2, 32, PLAIN), 32),
]
CASES = [Case(name, partial(make, *args), reduction) for name, args, reduction in BATCHES]
