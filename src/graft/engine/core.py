"""The nouns of the engine: requests, what they give, and what a call took."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from graft.base.errors import GraftError
from graft.engine.kv.manager import Table
from graft.engine.logprobs import Logprob
from graft.engine.masks import TokenMask
from graft.engine.params import SamplingParams
from graft.engine.text.detokenize import TextStream

FinishReason = Literal["length", "stop", "abort", "error"]


@dataclass(frozen=True)
class Output:
    """What a request gave: its new tokens, their text, and why it ended.

    finish_reason: `length` (max_tokens), `stop` (an end token, a stop token or a stop string, which `stop_reason`
    names), `abort` (cancelled), `error` (`error` says why; other requests go on). `alternatives` holds the other
    n - 1 samples of a request with n > 1.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[dict[int, Logprob]] | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0  # of the prompt, found in the cache
    error: GraftError | None = None
    alternatives: tuple[Output, ...] = ()
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # one a token of the prompt; None for the first

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values; the error as its message."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "logprobs": self.logprobs and [{t: asdict(p) for t, p in each.items()} for each in self.logprobs],
            "stop_reason": self.stop_reason,
            "cached_tokens": self.cached_tokens,
            "error": None if self.error is None else str(self.error),
            "alternatives": [other.to_json() for other in self.alternatives],
            "prompt_token_ids": self.prompt_token_ids,
            "prompt_logprobs": self.prompt_logprobs
            and [each and {t: asdict(p) for t, p in each.items()} for each in self.prompt_logprobs],
        }


@dataclass(frozen=True)
class EmbeddingOutput:
    """What `LLM.embed` gives for a prompt: a vector, or why there is none."""

    embedding: list[float]
    prompt_token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0  # of the prompt, found in the cache
    error: GraftError | None = None


@dataclass(eq=False)  # a request is itself, whatever its tokens
class Request:
    """A prompt on its way. `computed` tokens are in the cache; the rest are fed in the next steps.

    Steps that are launched and not yet known count in `fed` and `length`, so that the next can be planned.
    """

    prompt: list[int]
    params: SamplingParams
    generator: torch.Generator | None = None
    stream: TextStream | None = None  # of its text
    priority: int = 0
    order: tuple[int, int] = (0, 0)  # the scheduler's; smaller goes first
    tokens: list[int] = field(default_factory=list)
    table: Table | None = None  # while it runs
    state_slot: int | None = None  # while it runs, where its model has recurrent layers
    computed: int = 0
    feeding: int = 0  # tokens that steps in flight bring into the cache
    coming: int = 0  # tokens that steps in flight choose
    read: int = 0  # new tokens that `stream` has been fed
    whole_text: bool = False  # nothing more will come
    arrived: float = 0.0  # when the scheduler got it, by time.monotonic
    queued: float = 0.0  # seconds until it was first admitted
    cached: int | None = None  # prompt tokens found in the cache when it was first admitted
    preemptions: int = 0
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # of the prompt's tokens but the first
    embedding: list[float] | None = None  # of a request that is pooled, once its prompt is computed
    pooled: torch.Tensor | None = None  # the sum of hidden states so far, where the mean of all is wanted
    computes_all: bool = False  # of the prompt, so that none of it is taken from the cache
    mask: TokenMask | None = None  # which tokens may come next
    leader: Request | None = None  # the first of the samples of n > 1, for the others
    siblings: list[Request] = field(default_factory=list)  # the others, for the first
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: GraftError | None = None
    lock: Any = field(default_factory=threading.RLock, repr=False)  # a token, and whether it is the last, come as one

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def scores_prompt(self) -> bool:
        """It wants logprobs of its prompt, and has not got them all: every token of it must be computed."""
        wanted = self.params.prompt_logprobs is not None and self.leader is None
        return wanted and len(self.prompt_logprobs) < len(self.prompt) - 1

    @property
    def most_tokens(self) -> int:
        """How many tokens it can come to in the cache; the last one is never fed back."""
        return len(self.prompt) + self.params.max_tokens - 1

    @property
    def fed(self) -> int:
        """Tokens in the cache when everything in flight has landed."""
        return self.computed + self.feeding

    @property
    def length(self) -> int:
        """Its tokens when everything in flight has landed."""
        return len(self.tokens) + self.coming

    # These two are asked of a thousand requests in every step: a property that asks another would cost as much again.
    @property
    def ending(self) -> bool:
        """The last token that it may have is in flight."""
        coming = self.coming
        return coming > 0 and len(self.tokens) + coming - len(self.prompt) >= self.params.max_tokens

    @property
    def decoding(self) -> bool:
        """All but one of its tokens are in the cache, and at least one of them is its own."""
        coming = self.coming
        length = len(self.tokens) + coming
        if self.computed + self.feeding != length - 1:
            return False
        own = length - len(self.prompt)
        return own > 0 and not (coming > 0 and own >= self.params.max_tokens)

    @property
    def family(self) -> list[Request]:
        return [self, *self.siblings]

    def read_text(self) -> str:
        """All text that is certain by now. The token that ended the request is no part of it, unless asked for."""
        if self.stream is None:
            return ""
        with self.lock:
            if not self.whole_text:
                tokens = self.new_tokens
                if self.ended_by_token and not self.params.include_stop_str_in_output:
                    tokens = tokens[:-1]
                for token in tokens[self.read :]:
                    self.stream.feed(token)
                self.read = len(tokens)
                if self.finish_reason is not None:
                    self.stream.finish()
                    self.whole_text = True
            return self.stream.text

    @property
    def ended_by_token(self) -> bool:
        return self.finish_reason == "stop" and not isinstance(self.stop_reason, str)


@dataclass(frozen=True)
class Stats:
    """What the calls since the engine was last idle took. A step that only decodes counts as decode."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts, not computed again
    new_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    replayed_steps: int = 0  # decode steps that were one replay of a capture
    steps_ahead: int = 0  # steps launched before the tokens of the step ahead of them were known
    bucket_misses: int = 0  # decode steps for which there was no capture, where captures are on
    host_sampled_tokens: int = 0  # tokens whose nucleus was too wide for a CUDA graph and that the host sampled

    @property
    def decode_rate(self) -> float:
        """Tokens per second of the steps that only decode."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0
