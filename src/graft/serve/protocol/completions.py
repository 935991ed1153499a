"""Answers of /v1/completions and /v1/chat/completions: one body, or chunks of one choice each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from graft.serve.protocol import answers
from graft.serve.protocol.answers import Envelope
from graft.serve.protocol.choices import Choice, Piece, Pieces
from graft.serve.protocol.requests import Asked


@dataclass(frozen=True)
class CompletionFormat:
    """before: texts of the prompts, where they are echoed."""

    asked: Asked
    envelope: Envelope
    prompts: Sequence[list[int]]
    tokens: Pieces
    before: Sequence[str] = ()
    scored: dict[int, Any] = field(default_factory=dict)  # prompt_logprobs of each prompt, which its choices share

    @property
    def keeps(self) -> bool:
        return not self.asked.stream

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        made = [self.choice(one, one.whole()) for one in choices]
        scores = self.scores(choices[0]) if self.envelope.chat else {}
        return {**self.envelope.body(made, chunk=False), "usage": self.usage(choices), **scores}

    def begin(self) -> bytes:
        return b""

    def chunk(self, choice: Choice, piece: Piece, choices: Sequence[Choice]) -> bytes:
        """Nothing where there is nothing to say yet: text may be held back."""
        if not (answers.says_something(choice, piece) or self.asked.return_token_ids):
            return b""
        made = answers.chat_chunk(choice, piece, self.tokens) if self.envelope.chat else self.choice(choice, piece)
        if self.envelope.chat:
            made |= self.ids(choice, piece)
        choice.begun = True
        if not self.asked.include_usage:
            return self.envelope.chunk(made)
        return self.envelope.chunk(made, self.usage(choices) if self.asked.usage_in_chunks else None)

    def end(self, choices: Sequence[Choice]) -> bytes:
        last = {**self.envelope.body([], chunk=True), "usage": self.usage(choices)}
        return (answers.event(last) if self.asked.include_usage else b"") + answers.DONE

    def choice(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        if self.envelope.chat:
            return answers.chat_choice(choice, piece, self.tokens) | self.ids(choice, piece)
        prompt = choice.index // choice.params.n
        before = self.before[prompt] if self.before and not choice.begun else ""
        scored = self.prompts[prompt] if self.before and not choice.begun else ()
        made = answers.text_choice(choice, piece, self.tokens, before, scored)
        return made | self.ids(choice, piece) | self.scores(choice)

    def ids(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Of the answer or the chunk, and of the prompt once."""
        if not self.asked.return_token_ids:
            return {}
        prompt = None if choice.begun else self.prompts[choice.index // choice.params.n]
        return {"token_ids": list(piece.tokens), "prompt_token_ids": prompt}

    def scores(self, choice: Choice) -> dict[str, Any]:
        if not self.asked.prompt_logprobs:
            return {}
        prompt = choice.index // choice.params.n
        if prompt not in self.scored:
            self.scored[prompt] = answers.prompt_logprobs(choice, self.prompts[prompt], self.tokens)
        return {"prompt_logprobs": self.scored[prompt]}

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return answers.usage(sum(map(len, self.prompts)), choices)
