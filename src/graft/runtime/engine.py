"""The engine. `step` is its heart: schedule, run the graph, sample, take stock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graft.kvcache.blocks import KVCache
from graft.runtime.batch import pack
from graft.runtime.core import Request, Stats
from graft.runtime.params import SamplingParams
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

    def add(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Request]:
        """Takes all of the requests, or none where one of them can never run."""
        requests = [
            Request(prompt, each, make_generator(each.seed) if each.temperature > 0 else None)
            for prompt, each in zip(prompts, params, strict=True)
        ]
        self.scheduler.add(requests)
        return requests

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
        for request, count in zip(requests, counts, strict=True):
            request.computed += count
        whole = [row for row, request in enumerate(requests) if request.computed == len(request.tokens)]
        grown = [requests[row] for row in whole]
        for request, choice in zip(grown, sample(logits[whole], grown, self.stop_tokens), strict=True):
            token = choice.token
            request.tokens.append(token)
            if token in self.stop_tokens and not request.params.ignore_eos:
                request.finish_reason = "stop"
            elif len(request.new_tokens) >= request.params.max_tokens:
                request.finish_reason = "length"
            if request.finish_reason:
                self.scheduler.finish(request)
        return grown

    def abort(self, requests: Sequence[Request]) -> None:
        """Drops those of the requests that are still waiting or running, and frees their blocks."""
        for request in requests:
            if request in self.scheduler.waiting:
                self.scheduler.waiting.remove(request)
            elif request in self.scheduler.running:
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
