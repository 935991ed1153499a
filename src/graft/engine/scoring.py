"""Logprobs of prompts: the logits of every token of a chunk, where a request asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from graft.engine.core import Request
from graft.engine.logprobs import logprobs
from graft.engine.scheduler import StepPlan

ROWS = 128  # of logits that are widened to float32 at once


@dataclass(frozen=True)
class ScoredPrompt:
    """The tokens first…last-1 of a request's prompt are in a step, and say how likely first+1…last were. indices: of
    these tokens in the step."""

    request: Request
    first: int
    last: int
    indices: range


def scored_prompts(plan: StepPlan) -> list[ScoredPrompt]:
    """Nothing, in a step without such requests. The last token of a prompt says nothing of the prompt."""
    found, at = [], 0
    for request, count in zip(plan.requests, plan.counts, strict=True):
        if request.scores_prompt:
            last = min(request.fed + count, len(request.prompt) - 1)
            found.append(ScoredPrompt(request, request.fed, last, range(at, at + last - request.fed)))
        at += count
    return found


def take_scores(scored: Sequence[ScoredPrompt], logits: Tensor) -> Tensor:
    """Gives the requests what the last rows of the logits [n + scored, vocab] say of their prompts; the first n. A
    chunk that is computed again, after a step that failed, takes the place of what was there."""
    if not scored:
        return logits
    rows = len(logits) - sum(len(one.indices) for one in scored)
    own, rest = logits[:rows], logits[rows:]
    for one in scored:
        count = one.request.params.prompt_logprobs or 0
        tokens = one.request.prompt[one.first + 1 : one.last + 1]
        found = []
        for start in range(0, len(tokens), ROWS):
            some = tokens[start : start + ROWS]
            found += logprobs(rest[start : start + len(some)], some, [count] * len(some))
        one.request.prompt_logprobs[one.first :] = found
        rest = rest[len(tokens) :]
    return own
