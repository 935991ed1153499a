"""Answers of /v1/responses: items one after another (thoughts, messages, calls), whole or as events.

Both come from one builder, which is fed the pieces of an answer: the whole is what the events put together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graft.serve.protocol import answers
from graft.serve.protocol.choices import Choice, Piece, Pieces
from graft.serve.protocol.requests import AskedChat
from graft.serve.protocol.values import Json, mapping
from graft.serve.tools.parser import CallDelta

Told = tuple[str, dict[str, Any]]  # an event: its kind and fields
PREFIX = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


@dataclass(eq=False)
class OutputItems:
    """The items so far; the last one is open until another begins."""

    id: str
    items: list[dict[str, Any]] = field(default_factory=list)
    call: int = -1  # the index of the call that is open
    waiting: list[dict[str, Any]] = field(default_factory=list)  # logprobs of tokens whose text has not come yet

    def feed(self, choice: Choice, piece: Piece, likely: Sequence[dict[str, Any]] = ()) -> Iterator[Told]:
        """likely: logprobs of its tokens, of which messages have those of their text."""
        self.waiting += likely
        if piece.elsewhere:
            self.waiting.clear()
        if piece.reasoning:
            yield from self.text("reasoning", piece.reasoning)
        for part in piece.parts:
            if isinstance(part, str):
                yield from self.text("message", part)
            else:
                yield from self.more_of_call(choice, part)

    def text(self, kind: str, more: str) -> Iterator[Told]:
        yield from self.opened(kind)
        part, name = self.last["content"][0], "output_text" if kind == "message" else "reasoning_text"
        part["text"] += more
        found, self.waiting = self.waiting, []
        extra = {"logprobs": found} if kind == "message" else {}
        if kind == "message":
            part["logprobs"] += found
        yield f"{name}.delta", {**self.site, "content_index": 0, "delta": more, **extra}

    def more_of_call(self, choice: Choice, part: CallDelta) -> Iterator[Told]:
        self.waiting.clear()
        if part.index != self.call:
            self.call = part.index
            facts = {"call_id": choice.call_ids[part.index], "name": part.name or "", "arguments": ""}
            yield from self.opened("function_call", **facts)
        if part.arguments:
            self.last["arguments"] += part.arguments
            yield "function_call_arguments.delta", {**self.site, "delta": part.arguments}

    def opened(self, kind: str, **facts: Any) -> Iterator[Told]:
        """An item of this kind is the last one and open."""
        if self.items and self.last["type"] == kind != "function_call" and self.last["status"] == "in_progress":
            return
        yield from self.closed("completed")
        made: dict[str, Any] = {"id": f"{PREFIX[kind]}_{self.id}_{len(self.items)}", "type": kind}
        made["status"] = "in_progress"
        if kind == "function_call":
            made |= facts
        else:
            made |= {"role": "assistant"} if kind == "message" else {"summary": []}
            made["content"] = []
        self.items.append(made)
        yield "output_item.added", {"output_index": self.index, "item": {**made}}
        if kind != "function_call":
            made["content"] = [new_part(kind)]
            yield "content_part.added", {**self.site, "content_index": 0, "part": new_part(kind)}

    def closed(self, status: str) -> Iterator[Told]:
        """The last item is over."""
        if not self.items or self.last["status"] != "in_progress":
            return
        item = self.last
        if item["type"] == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield "function_call_arguments.done", {**self.site, **told}
        else:
            name, part = "output_text" if item["type"] == "message" else "reasoning_text", item["content"][0]
            extra = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield f"{name}.done", {**self.site, "content_index": 0, "text": part["text"], **extra}
            yield "content_part.done", {**self.site, "content_index": 0, "part": part}
        item["status"] = status
        yield "output_item.done", {"output_index": self.index, "item": item}

    def end(self, status: str) -> Iterator[Told]:
        """An answer without anything is an empty message."""
        if not self.items:
            yield from self.opened("message")
        if self.waiting and self.last["type"] == "message":  # of an end token, which has no text
            yield from self.text("message", "")
        yield from self.closed(status)

    @property
    def last(self) -> dict[str, Any]:
        return self.items[-1]

    @property
    def index(self) -> int:
        return len(self.items) - 1

    @property
    def site(self) -> dict[str, Any]:
        return {"output_index": self.index, "item_id": self.last["id"]}


def new_part(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


@dataclass(frozen=True)
class ResponseFormat:
    """body: what was asked, of which the response repeats some."""

    asked: AskedChat
    id: str
    created: int
    prompt: int  # tokens
    body: Json
    tokens: Pieces  # for logprobs
    keeps: bool = True  # the last events have the whole text
    numbers: Iterator[int] = field(default_factory=itertools.count)
    items: list[OutputItems] = field(default_factory=list)  # of the stream, once it has begun

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        made = OutputItems(self.id)
        for piece in choice.pieces:
            for _ in made.feed(choice, piece, self.likely(piece)):
                pass
        for _ in made.end(self.status(choice)):
            pass
        return self.ended(choice, made, choices)

    def likely(self, piece: Piece) -> list[dict[str, Any]]:
        found = answers.chat_logprobs(piece, self.tokens)
        return [] if found is None else found["content"]

    def status(self, choice: Choice) -> str:
        return "incomplete" if choice.last is not None and choice.last.finish_reason == "length" else "completed"

    def ended(self, choice: Choice, made: OutputItems, choices: Sequence[Choice]) -> dict[str, Any]:
        status = self.status(choice)
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self.state(status, output=made.items, incomplete_details=cut, usage=self.usage(choices))

    def state(self, status: str, **more: Any) -> dict[str, Any]:
        asked, params = self.body, self.asked.params
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata") if isinstance(asked.get("metadata"), Mapping) else {},
            "model": self.asked.model,
            "output": [],
            "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": mapping(mapping(asked, "text"), "format") or {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": [shown_tool(one) for one in asked.get("tools") or ()],
            "top_logprobs": params.logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        } | more

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        found = answers.usage(self.prompt, choices)
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": {**found["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)},
            "total_tokens": found["total_tokens"],
        }

    def events(self, told: Iterator[Told]) -> bytes:
        return b"".join(self.event(kind, **fields) for kind, fields in told)

    def event(self, kind: str, **more: Any) -> bytes:
        body = {"type": f"response.{kind}", "sequence_number": next(self.numbers), **more}
        return f"event: response.{kind}\n".encode() + answers.event(body)

    def begin(self) -> bytes:
        self.items.append(OutputItems(self.id))
        state = self.state("in_progress")
        return self.event("created", response=state) + self.event("in_progress", response=state)

    def chunk(self, choice: Choice, piece: Piece, choices: Sequence[Choice]) -> bytes:  # noqa: ARG002
        return self.events(self.items[0].feed(choice, piece, self.likely(piece)))

    def end(self, choices: Sequence[Choice]) -> bytes:
        (choice,), (made,) = choices, self.items
        last = self.events(made.end(self.status(choice)))
        return last + self.event(self.status(choice), response=self.ended(choice, made, choices))


def shown_tool(given: Json) -> dict[str, Any]:
    """With the fields that clients' types want."""
    return {"strict": False, "parameters": None, **given}
