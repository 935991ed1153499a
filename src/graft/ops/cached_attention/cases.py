"""Batches of sequences over a paged cache that holds their new tokens already."""

from __future__ import annotations

from functools import partial
from typing import Any

from graft.ops.cases import Case
from graft.ops.paged_batches import BATCHES as PAGED
from graft.ops.paged_batches import PLAIN
from graft.ops.paged_batches import make as make_paged


def make(*args: Any) -> tuple[Any, ...]:
    q, _, _, k_cache, v_cache, _, *rest = make_paged(*args)
    return q, k_cache, v_cache, *rest


BATCHES = [
    *PAGED,
    ("llama-3.1-8b decode, context 300", ((1,), (299,), 8, 2, 128, PLAIN), 300),
    ("gemma-3-1b decode, head size 256", ((1, 1), (69, 20), 4, 1, 256, (40, None, False)), 256),
    ("phi-3 chunk, head size 96", ((20,), (50,), 4, 4, 96, PLAIN), 96),
    ("gpt-oss decode, sinks and window", ((1, 1), (90, 3), 8, 1, 64, (50, None, True)), 64),
    ("decode, sinks and a soft cap, one long context", ((1, 1), (270, 3), 6, 1, 32, (None, 20.0, True)), 271),
]
CASES = [Case(name, partial(make, *args), reduction) for name, args, reduction in BATCHES]
