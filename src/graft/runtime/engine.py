"""The engine. `step` is its heart: schedule, run the graph, sample, take stock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graft.kvcache.blocks import KVCache
from graft.runtime.batch import pack
from graft.runtime.core import Request, SamplingParams, Stats
from graft.runtime.sampling import make_generator, sample
from graft.runtime.scheduler import Scheduler


class Engine:
    """Runs requests over one lowered graph and one cache."""

    def __init__(self, graph: Callable[..., Any], cache: KVCache, stop_tokens: frozenset[int]) -> None:
        self.graph = graph
        self.cache = cache
        self.scheduler = Scheduler(cache)
        self.stop_tokens = stop_tokens
        self.stats = Stats()

    def add(self, prompt: list[int], params: SamplingParams) -> Request:
        request = Request(prompt, params, make_generator(params.seed) if params.temperature > 0 else None)
        self.scheduler.add(request)
        return request

    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Feeds the next tokens and returns the requests that got a new one."""
        started = time.perf_counter()
        requests, counts = self.scheduler.schedule()
        batch = pack(requests, counts, self.cache.block_size, self.cache.device)
        (logits,) = self.graph(*batch.inputs(), *self.cache.tensors)  # [1, n, vocab]
        grown = self.advance(requests, counts, logits[0])
        self.count(sum(counts), len(grown), counts, time.perf_counter() - started)
        return grown

    def advance(self, requests: list[Request], counts: list[int], logits: Tensor) -> list[Request]:
        """Samples for the requests whose whole prompt is in the cache, and ends those that are done."""
        tokens = sample(logits, requests)
        grown = []
        for request, count, token in zip(requests, counts, tokens, strict=True):
            request.computed += count
            if request.computed < len(request.tokens):
                continue
            request.tokens.append(token)
            grown.append(request)
            if token in self.stop_tokens and not request.params.ignore_eos:
                request.finish_reason = "stop"
            elif len(request.new_tokens) >= request.params.max_tokens:
                request.finish_reason = "length"
            if request.finish_reason:
                self.scheduler.finish(request)
        return grown

    def abort(self) -> None:
        """Drops everything that is waiting or running and frees its blocks."""
        self.scheduler.waiting.clear()
        for request in list(self.scheduler.running):
            self.scheduler.finish(request)

    def count(self, fed: int, grown: int, counts: list[int], seconds: float) -> None:
        decoding = max(counts) == 1 and self.stats.new_tokens > 0
        s = self.stats
        self.stats = replace(
            s,
            prompt_tokens=s.prompt_tokens + (0 if decoding else fed),
            new_tokens=s.new_tokens + grown,
            prefill_seconds=s.prefill_seconds + (0.0 if decoding else seconds),
            decode_seconds=s.decode_seconds + (seconds if decoding else 0.0),
            decode_tokens=s.decode_tokens + (grown if decoding else 0),
        )
