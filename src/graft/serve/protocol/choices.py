"""An answer as its tokens come: text that is certain, logprobs, and how it ended."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from graft.engine.params import SamplingParams
from graft.engine.text.detokenize import TextStream
from graft.serve.tools.parser import CallDelta, ToolParser
from graft.serve.tools.reasoning import ThinkParser
from graft.serve.wire import AnswerRow, TokenLogprobs


class Pieces(Protocol):
    """As much of a tokenizer as answers need."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def piece(self, token: int) -> str: ...


@dataclass(frozen=True)
class Piece:
    """What came at once."""

    text: str
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    parts: Sequence[str | CallDelta] = ()  # content and calls, in their order
    reasoning: str = ""
    elsewhere: bool = False  # it ends in thoughts or in a call: its last token is none of the content's

    @property
    def calls(self) -> list[CallDelta]:
        return [one for one in self.parts if isinstance(one, CallDelta)]


@dataclass(eq=False)
class Choice:
    """One sample of one prompt. stream: None where the model has no tokenizer."""

    index: int
    params: SamplingParams
    stream: TextStream | None
    keep: bool = True  # all of its pieces, for `whole`
    tokens: int = 0
    cached: int = 0
    last: Piece | None = None
    pieces: list[Piece] = field(default_factory=list)
    begun: bool = False  # its first chunk was sent
    offset: int = 0  # characters of tokens so far, for logprobs
    silent: bool = False  # what comes is not shown: the prompt alone was asked for
    prompt_logprobs: Sequence[TokenLogprobs] | None = None  # of the prompt's tokens but the first
    parser: ToolParser | None = None  # where calls are looked for in its text
    call_ids: list[str] = field(default_factory=list)
    thinker: ThinkParser | None = None  # where thoughts are looked for
    reasoning_tokens: int = 0

    @property
    def ended(self) -> bool:
        return self.last is not None and self.last.finish_reason is not None

    @property
    def calls_are_whole(self) -> bool:
        """Clients that read `tool_calls` run them: half of the arguments is none."""
        return bool(self.call_ids) and self.parser is not None and not self.parser.broken

    @property
    def elsewhere(self) -> bool:
        """What came last is a part of thoughts or of a call."""
        thinks = self.thinker is not None and self.thinker.state in ("inside", "behind")
        return thinks or (self.parser is not None and self.parser.told and self.parser.rule is not None)

    def take(self, row: AnswerRow) -> Piece:
        """The same text as Request.read_text: the token that ended the answer is no part of it, unless asked for."""
        if self.silent:
            reason = "length" if row.finish_reason == "stop" else row.finish_reason
            none = None if row.logprobs is None else []
            row = row._replace(tokens=[], logprobs=none, finish_reason=reason, stop_reason=None)
        elsewhere, self.tokens = self.elsewhere, self.tokens + len(row.tokens)
        self.cached = row.cached
        by_token = row.finish_reason == "stop" and not isinstance(row.stop_reason, str)
        shown = row.tokens[:-1] if by_token and not self.params.include_stop_str_in_output else row.tokens
        last = row.finish_reason is not None
        reasoning, text = self.read(shown, last)
        parts: list[str | CallDelta] = [text] if text else []
        if self.parser is not None:
            parts = self.parsed(self.parser, text, last)
            text = "".join(one for one in parts if isinstance(one, str))
        reason = "tool_calls" if row.finish_reason == "stop" and self.calls_are_whole else row.finish_reason
        self.last = piece = Piece(
            text, row.tokens, row.logprobs, reason, row.stop_reason, parts, reasoning,
            self.elsewhere or (elsewhere and not text),
        )  # fmt: skip
        if self.keep:
            self.pieces.append(piece)
        return piece

    def read(self, tokens: Sequence[int], last: bool) -> tuple[str, str]:
        """Thoughts and text that are certain by now."""
        if self.stream is None:
            return "", ""
        texts = [self.stream.feed(token) for token in tokens]
        if last:
            texts.append(self.stream.finish())
        if self.thinker is None:
            return "", "".join(texts)
        found = []
        for at, text in enumerate(texts):
            found.append(self.thinker.feed(text))
            self.reasoning_tokens += self.thinker.state == "inside" and at < len(tokens)
        if last:
            found.append(self.thinker.finish())
        return "".join(thought for thought, _ in found), "".join(text for _, text in found)

    def parsed(self, parser: ToolParser, text: str, last: bool) -> list[str | CallDelta]:
        """Content and calls. An id is made with a call's first piece."""
        found = parser.feed(text) + (parser.finish() if last else [])
        calls = [one for one in found if isinstance(one, CallDelta)]
        while len(self.call_ids) < max((one.index + 1 for one in calls), default=0):
            made = uuid.uuid4().hex
            self.call_ids.append(made[:9] if parser.format.short_ids else f"call_{made[:24]}")
        return found

    def whole(self) -> Piece:
        """All of it, after its end."""
        last, logprobs = self.pieces[-1], None
        if last.logprobs is not None:
            logprobs = [one for piece in self.pieces for one in piece.logprobs or ()]
        return Piece(
            "".join(piece.text for piece in self.pieces),
            [token for piece in self.pieces for token in piece.tokens],
            logprobs,
            last.finish_reason,
            last.stop_reason,
            [part for piece in self.pieces for part in piece.parts],
            "".join(piece.reasoning for piece in self.pieces),
        )
