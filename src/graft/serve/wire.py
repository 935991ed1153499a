"""What the HTTP process and the engine process say to each other: JSON in frames, each behind its length.

to the engine     {"load": {…}}                          once, first
                  {"submit": [{id, prompt, params, priority}, …]}  all before the same step; params: index into
                      "params": [{…}, …]                           those that differ
                      {"abort": [id, …]}, {"expire": [id, …]}
                  {"follow_events": 1}                   somebody reads them: send under this number; null: none
from the engine   {"progress": "words"}                  while it loads
                  {"ready": {…}} or {"failed": "why"}    once
                  {"rows": [[…], …], "load": {…}}        after a step, and each second
                  {"events": [{…}, …], "of": 1}          of the cache, while somebody reads them
"""

from __future__ import annotations

import json
import socket
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from graft.engine.params import SamplingParams

LENGTH = struct.Struct("!I")
Message = Mapping[str, Any]


def frame(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def submission(
    numbers: Iterable[int], prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], priority: int = 0
) -> Message:
    """Parameters that are equal are sent once: a thousand prompts may share a thousand biases."""
    known: dict[SamplingParams, int] = {}
    each = zip(numbers, prompts, params, strict=True)
    made = [
        {"id": n, "prompt": list(ids), "params": known.setdefault(p, len(known)), "priority": priority}
        for n, ids, p in each
    ]
    return {"submit": made, "params": [vars(one) for one in known]}


def messages(connection: socket.socket) -> Iterator[Message]:
    """What comes, until the other side is gone. Blocks."""
    with connection.makefile("rb") as file:
        while len(head := file.read(LENGTH.size)) == LENGTH.size:
            (size,) = LENGTH.unpack(head)
            body = file.read(size)
            if len(body) < size:
                return
            yield json.loads(body)


def as_base64(vector: Sequence[float]) -> str:
    """float32, little-endian: as OpenAI has embeddings, and a quarter of what they take as decimal numbers."""
    return b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def from_base64(text: str) -> list[float]:
    raw = b64decode(text)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


class TokenLogprobs(NamedTuple):
    """Of a token that was chosen, or is in the prompt: its own logprob, and [token, logprob] of the likeliest. rank:
    how many are likelier, plus one; of the prompt alone."""

    logprob: float
    top: Sequence[tuple[int, float]]
    rank: int = 0


class AnswerRow(NamedTuple):
    """What a sample of a request has come to since the last row of it."""

    id: int
    sample: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    cached: int  # tokens of the prompt that were found in the cache
    error: str | None
    prompt_logprobs: list[TokenLogprobs] | None = None  # of its tokens but the first; in the first row of sample 0
    queued: float = 0.0  # seconds that it waited to be admitted
    embedding: str | None = None  # of a request that is pooled: float32, little-endian, in base64

    def singles(self) -> list[AnswerRow]:
        """A row for each of its tokens; the end comes with the last, what is of the prompt with the first."""
        if self.logprobs is None or len(self.tokens) < 2:
            return [self]
        rest = self._replace(prompt_logprobs=None)
        each: list[AnswerRow] = [
            rest._replace(tokens=[token], logprobs=[one], finish_reason=None, stop_reason=None)
            for token, one in zip(self.tokens, self.logprobs, strict=True)
        ]
        each[0] = each[0]._replace(prompt_logprobs=self.prompt_logprobs)
        each[-1] = each[-1]._replace(finish_reason=self.finish_reason, stop_reason=self.stop_reason)
        return each

    @classmethod
    def parse(cls, given: list[Any]) -> AnswerRow:
        row = cls(*given)
        lists = {name: getattr(row, name) for name in ("logprobs", "prompt_logprobs")}
        parsed: dict[str, Any] = {
            name: [TokenLogprobs(*one) for one in each] for name, each in lists.items() if each is not None
        }
        return row._replace(**parsed) if parsed else row


@dataclass(frozen=True)
class EngineLoad:
    """How the engine stands: for /metrics and /health. Counts are since it began."""

    running: int = 0
    waiting: int = 0
    blocks: int = 1
    used_blocks: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0
    host_hits: int = 0  # brought back from host memory; not among prefix_hits
    host_misses: int = 0  # neither there nor in the cache
    preemptions: int = 0
    steps: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class ServedModel:
    """What the HTTP process has to know of the model. tokenizer: the text of a tokenizer.json; None: token ids alone.

    probes: [text, ids, text again], as the engine's own tokenizer has them. end_tokens: those that end grammars.
    """

    name: str
    context: int
    vocabulary: int
    cache_tokens: int
    max_num_seqs: int
    tokenizer: str | None
    chat_template: str | None
    special_tokens: Mapping[str, str]
    probes: Sequence[tuple[str, list[int], str]]
    end_tokens: Sequence[int] = ()
    runner: str = "generate"  # or "pooling"
    matryoshka: Sequence[int] | None = ()  # dimensions that embeddings may be cut to; None: any
    width: int = 0  # of embeddings
