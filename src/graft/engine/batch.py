"""The tokens that a step feeds, packed into one row for the graph (ops/layout.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graft.engine.scheduler import StepPlan
from graft.ops import layout
from graft.ops.layout import Batch, HostBatch


def host_batch(plan: StepPlan, block_size: int) -> HostBatch:
    """The next `counts[i]` tokens of requests[i], i = 0…n-1; 0 for one that only the device knows (Feed)."""
    found = HostBatch()
    for request, count in zip(plan.requests, plan.counts, strict=True):
        assert request.table is not None
        first = request.fed
        known = [0] if request.coming else request.tokens[first : first + count]
        found.add(known, first, request.table.blocks, block_size)
    return found


def pack(plan: StepPlan, block_size: int, device: torch.device, scored: Sequence[int] = ()) -> Batch:
    """scored: tokens whose logits are wanted beside those of the last of each request."""
    found = host_batch(plan, block_size)
    found.logits_indices += scored
    return layout.pack(found, device)
