"""An engine that embeds: it feeds prompts as any engine does, and pools hidden states where others sample.

Its graph ends before the output projection (last_token_logits with `output: hidden`). A request ends with its prompt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graft.base.errors import EmbeddingNotFinite, EmptyPrompt, PromptTooLong
from graft.engine.core import Request
from graft.engine.engine import Engine
from graft.engine.params import SamplingParams
from graft.engine.scheduler import StepPlan
from graft.models.pooling import Pooling

NO_TOKENS = SamplingParams(max_tokens=1, ignore_eos=True)  # what the forecast of memory reads: nothing comes after it
SMALLEST = 1e-12  # that a length is divided by, as torch.nn.functional.normalize has it


class PoolingEngine(Engine):
    """Prompts are batched, chunked and found in the cache like others; with `mean` every token is computed."""

    pooling: Pooling  # pyrefly: ignore

    def __init__(self, *arguments: Any, pooling: Pooling, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.pooling = pooling

    def embed(self, ids: Sequence[int], context: int, *, priority: int = 0) -> Request:
        """A request, in any thread; one that could never run is refused."""
        if not ids:
            raise EmptyPrompt
        if len(ids) > context:
            raise PromptTooLong(len(ids), 0, context)
        request = self.make(ids, NO_TOKENS, priority=priority)
        request.computes_all = self.pooling.tokens == "mean"
        return request

    def next_step(self) -> list[Request]:
        started, plan = time.perf_counter(), self.next_plan()
        if not plan.requests:
            return self.nothing_to_do()
        rows = [i for i, (r, n) in enumerate(zip(plan.requests, plan.counts, strict=True)) if r.fed + n == r.length]
        with self.undone_on_error(plan, []):
            self.move_blocks()
            every = range(sum(plan.counts)) if self.pooling.tokens == "mean" else ()
            vectors = self.finished(self.pool(plan, self.run(plan, scored=every))[rows])
        for request, count in zip(plan.requests, plan.counts, strict=True):
            self.keep(request, count)
        whole = [plan.requests[row] for row in rows]
        for request, vector in zip(whole, vectors, strict=True):
            self.give(request, vector)
        self.count_prompts(whole, time.perf_counter() - started)
        return whole

    def pool(self, plan: StepPlan, hidden: Tensor) -> Tensor:
        """[n, d] of [n, d], or of [n + tokens, d] where all tokens count."""
        if self.pooling.tokens == "last":
            return hidden
        parts = hidden[len(plan.requests) :].float().split(plan.counts)
        for request, part in zip(plan.requests, parts, strict=True):
            before = request.pooled if request.computed else None  # one that gave way begins anew
            request.pooled = part.sum(0) if before is None else before + part.sum(0)
        means = [r.pooled / len(r.prompt) for r in plan.requests if r.pooled is not None]
        return torch.stack(means)

    def finished(self, vectors: Tensor) -> list[list[float]]:
        """On the host, in one copy."""
        wide = vectors.float()
        if self.pooling.normalize:
            wide = wide / wide.norm(dim=-1, keepdim=True).clamp_min(SMALLEST)
        return wide.tolist()

    def give(self, request: Request, vector: list[float]) -> None:
        request.pooled = None
        if not all(map(math.isfinite, vector)):
            request.error = EmbeddingNotFinite()
            self.end(request, "error")
            return
        request.embedding = vector
        self.end(request, "stop")

    def count_prompts(self, whole: list[Request], seconds: float) -> None:
        s = self.stats
        self.stats = replace(
            s,
            prompt_tokens=s.prompt_tokens + sum(len(request.prompt) for request in whole),
            cached_tokens=s.cached_tokens + sum(request.cached or 0 for request in whole),
            steps=s.steps + 1,
            preemptions=self.scheduler.preemptions,
            prefill_seconds=s.prefill_seconds + seconds,
        )
