"""Answers, chunks and errors in OpenAI's shape; `stop_reason` is vLLM's addition."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from graft.serve.protocol.choices import Choice, Piece, Pieces
from graft.serve.tools.parser import CallDelta

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
LEAST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot write
KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "internal_error", 503: "service_unavailable"}


def encode(value: object) -> bytes:
    """UTF-8; half of a surrogate pair, which a client may have sent, stays an escape."""
    return ENCODER.encode(value).encode(errors="backslashreplace")


def event(value: object) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = KINDS.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Envelope:
    """What every chunk of an answer repeats. chat: of /v1/chat/completions, or of /v1/completions."""

    id: str
    created: int
    model: str
    chat: bool

    def body(self, choices: Sequence[Mapping[str, Any]], *, chunk: bool) -> dict[str, Any]:
        kind = "chat.completion" + (".chunk" if chunk else "") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    @cached_property
    def head(self) -> bytes:
        """What every chunk begins with, up to its choice: written once for thousands of them."""
        return event(self.body([], chunk=True)).removesuffix(b"]}\n\n")

    def chunk(self, choice: Mapping[str, Any], *usage: Mapping[str, Any] | None) -> bytes:
        """An event of one choice. usage: null in all chunks but the last, unless each is to have it."""
        rest = b'],"usage":' + encode(usage[0]) if usage else b"]"
        return self.head + encode(choice) + rest + b"}\n\n"


def usage(prompt: int, choices: Iterable[Choice]) -> dict[str, Any]:
    """prompt: tokens of all prompts. Those found in the cache are counted once a prompt."""
    each = list(choices)
    new, cached = sum(one.tokens for one in each), sum(one.cached for one in each if not one.index % one.params.n)
    details = {"cached_tokens": cached}
    thought = {"completion_tokens_details": {"reasoning_tokens": sum(one.reasoning_tokens for one in each)}}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": details,
        **(thought if any(one.thinker is not None for one in each) else {}),
    }


def ending(piece: Piece) -> dict[str, Any]:
    return {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}


def text_choice(
    choice: Choice, piece: Piece, tokens: Pieces, before: str = "", prompt: Sequence[int] = ()
) -> dict[str, Any]:
    """Of /v1/completions, whole or a chunk. before: the prompt, where it is echoed; prompt: its tokens, where their
    logprobs are wanted, too."""
    likely = text_logprobs(choice, piece, tokens, prompt)
    return {"index": choice.index, "text": before + piece.text, "logprobs": likely, **ending(piece)}


def chat_choice(choice: Choice, piece: Piece, tokens: Pieces) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
    if piece.calls:
        message |= {"content": piece.text or None, "tool_calls": whole_calls(choice, piece)}
    message |= thoughts(piece)
    likely = chat_logprobs(piece, tokens)
    return {"index": choice.index, "message": message, "logprobs": likely, **ending(piece)}


def chat_chunk(choice: Choice, piece: Piece, tokens: Pieces) -> dict[str, Any]:
    delta: dict[str, Any] = {} if choice.begun else {"role": "assistant", "content": ""}
    delta |= thoughts(piece)
    if piece.text:
        delta["content"] = piece.text
    if piece.calls:
        delta["tool_calls"] = [call_chunk(choice, one) for one in piece.calls]
    return {"index": choice.index, "delta": delta, "logprobs": chat_logprobs(piece, tokens), **ending(piece)}


def thoughts(piece: Piece) -> dict[str, Any]:
    """Clients know them by one of two names: vLLM's newer one, and llama.cpp's and DeepSeek's."""
    return {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning} if piece.reasoning else {}


def whole_calls(choice: Choice, piece: Piece) -> list[dict[str, Any]]:
    calls = []
    for index, made in enumerate(choice.call_ids):
        some = [one for one in piece.calls if one.index == index]
        name, arguments = some[0].name, "".join(one.arguments for one in some)
        calls.append({"id": made, "type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


def call_chunk(choice: Choice, one: CallDelta) -> dict[str, Any]:
    """The first of a call has its id and name; the rest have pieces of its arguments."""
    if one.name is None:
        return {"index": one.index, "function": {"arguments": one.arguments}}
    called = {"name": one.name, "arguments": one.arguments}
    return {"index": one.index, "id": choice.call_ids[one.index], "type": "function", "function": called}


def says_something(choice: Choice, piece: Piece) -> bool:
    """Text may be held back, as the beginning of a stop string or of a character; logprobs are not."""
    return bool(
        piece.text or piece.reasoning or piece.calls or piece.logprobs or piece.finish_reason or not choice.begun
    )


def text_logprobs(choice: Choice, piece: Piece, tokens: Pieces, prompt: Sequence[int]) -> dict[str, Any] | None:
    """Nothing is known of a prompt's first token."""
    if piece.logprobs is None:
        return None
    first = [None] if prompt else []
    scores = [*(choice.prompt_logprobs or ()), *piece.logprobs] if prompt else piece.logprobs
    shown, offsets = [tokens.piece(token) for token in (*prompt, *piece.tokens)], []
    for text in shown:
        offsets.append(choice.offset)
        choice.offset += len(text)
    return {
        "tokens": shown,
        "token_logprobs": [*first, *(bounded(one.logprob) for one in scores)],
        "top_logprobs": [*first, *(by_text(one.top, tokens) for one in scores)],
        "text_offset": offsets,
    }


def prompt_logprobs(choice: Choice, prompt: Sequence[int], tokens: Pieces) -> list[dict[str, Any] | None]:
    """vLLM's: by token id; nothing of the first."""
    found: list[dict[str, Any] | None] = [None]
    for own, one in zip(prompt[1:], choice.prompt_logprobs or (), strict=True):
        ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(one.top, 1)}
        ranked[own] = one.logprob, one.rank
        found.append(
            {
                str(token): {"logprob": bounded(logprob), "rank": rank, "decoded_token": tokens.piece(token)}
                for token, (logprob, rank) in ranked.items()
            }
        )
    return found


def by_text(top: Sequence[tuple[int, float]], tokens: Pieces) -> dict[str, float]:
    """Likeliest first; of tokens with the same text, the likeliest."""
    found: dict[str, float] = {}
    for token, logprob in top:
        found.setdefault(tokens.piece(token), bounded(logprob))
    return found


def chat_logprobs(piece: Piece, tokens: Pieces) -> dict[str, Any] | None:
    if piece.logprobs is None:
        return None
    pairs = zip(piece.tokens, piece.logprobs, strict=True)
    content = [
        {**likely(token, one.logprob, tokens), "top_logprobs": [likely(t, p, tokens) for t, p in one.top]}
        for token, one in pairs
    ]
    return {"content": content, "refusal": None}


def likely(token: int, logprob: float, tokens: Pieces) -> dict[str, Any]:
    text = tokens.piece(token)
    return {"token": text, "logprob": bounded(logprob), "bytes": list(text.encode())}


def bounded(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
