"""How large the engine is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graft.base.device_memory import GIB, parse_size
from graft.base.errors import UsageError, near

LARGE_GPU = 40 * GIB  # memory; activations of 8,192 tokens of an 8B model take about one
MANY_TOKENS, FEW_TOKENS = 8192, 2048
MANY_SEQS, FEW_SEQS = 1024, 256
SHORT_REQUEST = 256  # tokens: with room for no more such requests, further rows of a step would stay empty
CACHE_DTYPES = ("auto", "fp8")
ADMISSIONS = ("forecast", "greedy")
RUNNERS = ("generate", "pooling")
SIZES = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_mixed_prefill_tokens")  # None: as it suits


@dataclass(frozen=True)
class EngineOptions:
    """Names as in vLLM; kv_cache_memory, max_mixed_prefill_tokens, admission and max_events are graft's own.

    kv_cache_dtype: "auto", the model's own, or "fp8": keys and values in one byte each, e4m3, with a scale for every
    token and head (ops/paged_cache.py).
    kv_cache_memory: bytes, or text like "2GiB"; None takes what is free, with a margin.
    kv_offloading_size: host memory, likewise, for blocks that the cache has no room for: they are copied back where a
    prompt, or a request that gave way, asks for them again. None: they are forgotten (kv/host.py).
    max_model_len: tokens of a request, prompt and answer; None: all that the model was made for.
    max_num_seqs: requests that run at once. None: see requests_at_once.
    max_num_batched_tokens: tokens of one step; longer prompts are fed in chunks. None: see tokens_of_a_step.
    max_mixed_prefill_tokens: of these, tokens of prompts in a step in which others decode, so that those wait less
    for their next token. None: as many as there is room for.
    admission: "forecast" lets a request in when the cache will hold all that run until they end, "greedy" when it
    holds the prompt, as vLLM does: more run at once, and some are preempted and computed again.
    enable_prefix_caching: prompts that begin alike share what is in the cache.
    max_events: blocks that events not yet read may tell of.
    enforce_eager: decode without CUDA graphs.
    cudagraph_capture_sizes: batch sizes that decode steps are captured for; None: see decode/buckets.py.
    self_check: at load, decode steps are compared with a full pass over the same tokens.
    runner: "generate", or "pooling": a vector for each prompt (`LLM.embed`), and no tokens.
    """

    kv_cache_dtype: str = "auto"
    kv_cache_memory: int | str | None = None
    kv_offloading_size: int | str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_mixed_prefill_tokens: int | None = None
    admission: str = "forecast"
    enable_prefix_caching: bool = True
    max_events: int = 65_536
    enforce_eager: bool = False
    cudagraph_capture_sizes: Sequence[int] | None = None
    self_check: bool = True
    runner: str = "generate"

    def __post_init__(self) -> None:
        for name in (*SIZES, "max_events"):
            value = getattr(self, name)
            if not is_size(value) and not (value is None and name != "max_events"):
                raise UsageError(f"{name} must be a whole number of at least 1, but is {value!r}")
        for name in ("enable_prefix_caching", "enforce_eager", "self_check"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise UsageError(f"{name} must be True or False, but is {value!r}")
        for name, allowed in (("kv_cache_dtype", CACHE_DTYPES), ("admission", ADMISSIONS), ("runner", RUNNERS)):
            asked = getattr(self, name)
            if asked not in allowed:
                raise UsageError(f"unknown {name} {asked!r}{near(str(asked), allowed)}")
        if self.cudagraph_capture_sizes is not None:
            object.__setattr__(self, "cudagraph_capture_sizes", self.capture_sizes(self.cudagraph_capture_sizes))
        if self.kv_cache_memory is not None:
            parse_size(self.kv_cache_memory)
        if self.kv_offloading_size is not None:
            parse_size(self.kv_offloading_size, "kv_offloading_size")
            if not self.enable_prefix_caching:
                raise UsageError(
                    "kv_offloading_size keeps blocks that prefix caching finds again; enable_prefix_caching=False"
                    " leaves it nothing: give one of them"
                )

    def context(self, longest: int) -> int:
        """max_model_len, of a model that was made for `longest`."""
        if self.max_model_len is not None and self.max_model_len > longest:
            raise UsageError(f"max_model_len is {self.max_model_len}, but the model's context has {longest} tokens")
        return self.max_model_len or longest

    def tokens_of_a_step(self, device: torch.device) -> int:
        """max_num_batched_tokens, or what suits the device: a large GPU is not busy with 2,048 tokens."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= LARGE_GPU
        return MANY_TOKENS if large else FEW_TOKENS

    def requests_at_once(self, device: torch.device, cached: int | None = None) -> int:
        """max_num_seqs, or what suits the device: on a GPU a power of two of short requests that the cache holds.
        cached: tokens; None: as many as one could wish."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        if device.type != "cuda":
            return FEW_SEQS
        room = MANY_SEQS if cached is None else min(max(cached // SHORT_REQUEST, 1), MANY_SEQS)
        return max(1 << (room.bit_length() - 1), *(self.cudagraph_capture_sizes or (1,)))

    def capture_sizes(self, asked: object) -> tuple[int, ...]:
        name = "cudagraph_capture_sizes"
        if not isinstance(asked, (list, tuple)) or not asked or not all(is_size(size) for size in asked):
            raise UsageError(f"{name} must be a list of whole numbers of at least 1, but is {asked!r}")
        if self.enforce_eager:
            raise UsageError(f"{name} and enforce_eager contradict each other: give one of them")
        if self.max_num_seqs is not None and max(asked) > self.max_num_seqs:
            raise UsageError(
                f"{name} has {max(asked)}, but no more than max_num_seqs={self.max_num_seqs} requests run at once"
            )
        return tuple(asked)


def is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
