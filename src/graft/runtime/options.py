"""How large the engine is."""

from __future__ import annotations

from dataclasses import dataclass

from graft.errors import UsageError
from graft.kvcache.memory import parse_size


@dataclass(frozen=True)
class EngineOptions:
    """Names as in vLLM; kv_cache_memory and max_events are graft's own.

    kv_cache_memory: bytes, or text like "2GiB"; None takes what is free, with a margin.
    max_num_seqs: requests that run at once.
    max_num_batched_tokens: tokens of one step; longer prompts are fed in chunks.
    enable_prefix_caching: prompts that begin alike share what is in the cache.
    max_events: blocks that events not yet read may tell of.
    """

    kv_cache_memory: int | str | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    max_events: int = 65_536

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_events"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} must be a whole number of at least 1, but is {value!r}")
        if not isinstance(self.enable_prefix_caching, bool):
            raise UsageError(f"enable_prefix_caching must be True or False, but is {self.enable_prefix_caching!r}")
        if self.kv_cache_memory is not None:
            parse_size(self.kv_cache_memory)
