"""Answers of /inference/v1/generate: token ids, whole or in chunks of one choice each. No text is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graft.serve.protocol import answers
from graft.serve.protocol.choices import Choice, Piece, Pieces
from graft.serve.protocol.token_requests import AskedTokens
from graft.serve.wire import TokenLogprobs


@dataclass(frozen=True)
class TokenFormat:
    asked: AskedTokens
    id: str
    created: int
    prompt: list[int]
    tokens: Pieces  # for prompt_logprobs, which show tokens as text, too

    @property
    def keeps(self) -> bool:
        return not self.asked.stream

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        scores = None
        if self.asked.prompt_logprobs:
            scores = answers.prompt_logprobs(choices[0], self.prompt, self.tokens)
        return {
            "request_id": self.id,
            "model": self.asked.model,
            "created": self.created,
            "choices": [self.choice(one, one.whole()) for one in choices],
            "usage": answers.usage(len(self.prompt), choices),
            "prompt_logprobs": scores,
            "prompt_token_ids": self.prompt if self.asked.return_token_ids else None,
            "kv_transfer_params": None,
        }

    def choice(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        return {
            "index": choice.index,
            "token_ids": list(piece.tokens),
            "logprobs": logprobs(piece),
            **answers.ending(piece),
        }

    def begin(self) -> bytes:
        return b""

    def chunk(self, choice: Choice, piece: Piece, choices: Sequence[Choice]) -> bytes:
        if not piece.tokens and piece.finish_reason is None:
            return b""
        first = self.asked.return_token_ids and not any(one.begun for one in choices)
        choice.begun = True
        more: dict[str, Any] = {"prompt_token_ids": self.prompt} if first else {}
        if self.asked.usage_in_chunks:
            more["usage"] = answers.usage(len(self.prompt), choices)
        return answers.event({"request_id": self.id, "choices": [self.choice(choice, piece)], **more})

    def end(self, choices: Sequence[Choice]) -> bytes:
        usage = answers.usage(len(self.prompt), choices)
        last = {"request_id": self.id, "choices": [], "usage": usage}
        return (answers.event(last) if self.asked.include_usage else b"") + answers.DONE


def logprobs(piece: Piece) -> dict[str, Any] | None:
    """Of each token, and of the likeliest, with the token itself first. `token` is what vLLM had before there was
    `token_id`."""
    if piece.logprobs is None:
        return None
    pairs = zip(piece.tokens, piece.logprobs, strict=True)
    return {"content": [{**scored(t, one.logprob), "top_logprobs": likeliest(t, one)} for t, one in pairs]}


def likeliest(token: int, one: TokenLogprobs) -> list[dict[str, Any]]:
    others = [scored(other, logprob) for other, logprob in one.top if other != token]
    return [scored(token, one.logprob), *others]


def scored(token: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "token_id": token, "logprob": answers.bounded(logprob)}
