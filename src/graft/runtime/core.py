"""The nouns of the engine: requests and outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from graft.runtime.params import SamplingParams

FinishReason = Literal["length", "stop"]


@dataclass(frozen=True)
class Output:
    """What a request gave: its new tokens, their text, and why it ended."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: None = None


@dataclass(eq=False)  # a request is itself, whatever its tokens
class Request:
    """A prompt on its way. `computed` tokens are in the cache; the rest are fed in the next step."""

    prompt: list[int]
    params: SamplingParams
    generator: torch.Generator | None = None
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def most_tokens(self) -> int:
        """How many tokens it can come to; the last one is never fed back."""
        return len(self.prompt) + self.params.max_tokens - 1


@dataclass(frozen=True)
class Stats:
    """What a generate call took, for tokens per second."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first token of each request."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0
