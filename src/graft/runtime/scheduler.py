"""Which requests run in the next step, and how many tokens of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from graft.errors import OutOfCache
from graft.kvcache.blocks import KVCache
from graft.runtime.core import Request


class Scheduler:
    """First come, first served. A request enters once all the blocks it can ever need are free, so it always ends."""

    def __init__(self, cache: KVCache, token_budget: int = 2048) -> None:
        self.cache = cache
        self.token_budget = token_budget
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            needed = self.cache.blocks_for(request.most_tokens)
            if needed > self.cache.limit:
                raise OutOfCache(
                    f"a request of {request.most_tokens} tokens needs {needed} blocks of the key-value cache"
                    f" ({needed * self.cache.bytes_per_block >> 20} MiB), but {self.cache.limit} fit into memory;"
                    " shorten it or lower max_tokens"
                )
        self.waiting.extend(requests)

    def schedule(self) -> tuple[list[Request], list[int]]:
        """Decoding requests first, one token each; then prompts, in chunks, while the budget lasts."""
        if not self.running:
            self.cache.reserve(sum(self.cache.blocks_for(r.most_tokens) for r in self.waiting))
        while self.waiting:
            needed = self.cache.blocks_for(self.waiting[0].most_tokens)
            if needed > len(self.cache.free):
                break
            request = self.waiting.popleft()
            request.blocks = self.cache.allocate(needed)
            self.running.append(request)
        chosen, counts, budget = [], [], self.token_budget
        for request in sorted(self.running, key=lambda r: len(r.tokens) - r.computed):
            count = min(len(request.tokens) - request.computed, budget)
            if count:
                chosen.append(request)
                counts.append(count)
                budget -= count
        return chosen, counts

    def finish(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.release(request.blocks)
        request.blocks = []
