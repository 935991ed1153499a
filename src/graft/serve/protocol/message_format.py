"""Answers of /v1/messages: blocks one after another (thoughts, text, calls), whole or as events.

As with responses, both come from one builder, so that the whole is what the events put together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from graft.serve.protocol import answers
from graft.serve.protocol.choices import Choice, Piece
from graft.serve.protocol.requests import AskedChat
from graft.serve.tools.parser import CallDelta
from graft.serve.tools.prefix import whole_members

Told = tuple[str, dict[str, Any]]  # an event: its kind and fields


@dataclass(eq=False)
class Blocks:
    """The blocks so far; the last one is open until another begins. A call's `input` is text until `whole`."""

    made: list[dict[str, Any]] = field(default_factory=list)
    open: bool = False
    call: int = -1  # the index of the call that is open

    def feed(self, choice: Choice, piece: Piece) -> Iterator[Told]:
        if piece.reasoning:
            yield from self.more("thinking", piece.reasoning)
        for part in piece.parts:
            if isinstance(part, str):
                yield from self.more("text", part)
            else:
                yield from self.more_of_call(choice, part)

    def more(self, kind: str, text: str) -> Iterator[Told]:
        if not self.open or self.made[-1]["type"] != kind:
            # nobody signs thoughts, and clients' types want the field
            yield from self.begin({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self.made[-1][kind] += text
        yield self.delta(f"{kind}_delta", **{kind: text})

    def more_of_call(self, choice: Choice, part: CallDelta) -> Iterator[Told]:
        if part.index != self.call:
            self.call = part.index
            named = {"id": choice.call_ids[part.index], "name": part.name or ""}
            yield from self.begin({"type": "tool_use", **named, "input": ""})
        if part.arguments:
            self.made[-1]["input"] += part.arguments
            yield self.delta("input_json_delta", partial_json=part.arguments)

    def begin(self, block: dict[str, Any]) -> Iterator[Told]:
        yield from self.end()
        self.made.append(block)
        self.open = True
        shown = {**block, "input": {}} if "input" in block else {**block}
        yield "content_block_start", {"index": self.index, "content_block": shown}

    def end(self) -> Iterator[Told]:
        if self.open:
            self.open = False
            yield "content_block_stop", {"index": self.index}

    def delta(self, kind: str, **fields: str) -> Told:
        return "content_block_delta", {"index": self.index, "delta": {"type": kind, **fields}}

    @property
    def index(self) -> int:
        return len(self.made) - 1

    @property
    def whole(self) -> list[dict[str, Any]]:
        """Of a call that broke off, the members that came whole: what clients make of its events."""
        return [{**one, "input": whole_members(one["input"])} if "input" in one else one for one in self.made]


@dataclass(eq=False)
class MessageFormat:
    asked: AskedChat
    id: str
    prompt: int  # tokens
    room: int  # new tokens that it may have, as many as were asked for or less
    blocks: Blocks = field(default_factory=Blocks)
    begun: bool = False

    @property
    def keeps(self) -> bool:
        return not self.asked.stream

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        for piece in choice.pieces:
            for _ in self.blocks.feed(choice, piece):
                pass
        return self.message(choices, content=self.blocks.whole, **self.ending(choice))

    def message(self, choices: Sequence[Choice], **more: Any) -> dict[str, Any]:
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.asked.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.usage(choices),
        } | more

    def ending(self, choice: Choice) -> dict[str, Any]:
        last = choice.last
        reason, by = (None, None) if last is None else (last.finish_reason, last.stop_reason)
        sequence = by if reason == "stop" and isinstance(by, str) else None
        found = "end_turn" if sequence is None else "stop_sequence"
        if reason == "tool_calls":
            found = "tool_use"
        elif reason == "length":
            found = "max_tokens" if self.room == self.asked.params.max_tokens else "model_context_window_exceeded"
        return {"stop_reason": found, "stop_sequence": sequence}

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """What was found in the cache is no part of input_tokens."""
        found = answers.usage(self.prompt, choices)
        cached = found["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": self.prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": found["completion_tokens"],
        }

    def event(self, kind: str, **fields: Any) -> bytes:
        return f"event: {kind}\n".encode() + answers.event({"type": kind, **fields})

    def events(self, told: Iterator[Told]) -> bytes:
        return b"".join(self.event(kind, **fields) for kind, fields in told)

    def begin(self) -> bytes:
        return b""

    def chunk(self, choice: Choice, piece: Piece, choices: Sequence[Choice]) -> bytes:
        """The first says how much of the prompt was found in the cache."""
        first = b"" if self.begun else self.event("message_start", message=self.message(choices))
        self.begun = True
        return first + self.events(self.blocks.feed(choice, piece))

    def end(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        last = self.event("message_delta", delta=self.ending(choice), usage=self.usage(choices))
        return self.events(self.blocks.end()) + last + self.event("message_stop")
