"""What one step adds to the engine's counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graft.engine.core import Request, Stats
from graft.engine.decode.loop import Counts
from graft.engine.scheduler import StepPlan


def counted(
    s: Stats,
    plan: StepPlan,
    grown: Sequence[Request],
    seconds: float,
    counts: Counts,
    preemptions: int,
    decoding: bool,
) -> Stats:  # fmt: skip
    """grown: who got a token. decoding: it is known to be a step that only decodes."""
    fed = sum(plan.counts)
    if not decoding:
        decoding = fed == len(grown) == len(plan.counts) and all(len(r.tokens) > len(r.prompt) + 1 for r in grown)
    first = [r for r in grown if r.leader is None and len(r.tokens) == len(r.prompt) + 1]
    return replace(
        s,
        prompt_tokens=s.prompt_tokens + sum(len(r.prompt) for r in first),
        cached_tokens=s.cached_tokens + sum(r.cached or 0 for r in first),
        new_tokens=s.new_tokens + len(grown),
        steps=s.steps + 1,
        preemptions=preemptions,
        prefill_seconds=s.prefill_seconds + (0.0 if decoding else seconds),
        decode_seconds=s.decode_seconds + (seconds if decoding else 0.0),
        decode_tokens=s.decode_tokens + (len(grown) if decoding else 0),
        replayed_steps=counts.replays,
        steps_ahead=counts.ahead,
        bucket_misses=counts.misses,
        host_sampled_tokens=counts.host_sampled,
    )
