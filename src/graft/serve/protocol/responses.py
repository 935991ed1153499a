"""/v1/responses, OpenAI's newer API, as far as text goes: a conversation in, one message out, whole or as events.

Nothing is stored: `previous_response_id` and `conversation` are refused, the client sends what was said before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graft.base.errors import HttpRefused
from graft.serve.protocol import answers
from graft.serve.protocol.choices import Choice, Piece
from graft.serve.protocol.requests import ROLES, AskedChat, message, served_name, template_options
from graft.serve.protocol.sampling import sampling, token_bound
from graft.serve.protocol.structure import text_format
from graft.serve.protocol.values import Json, boolean, mapping, text, wrong

TEXTS = ("input_text", "output_text", "text")
# field: values that ask for nothing
STATEFUL: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "include": ([],),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "prompt_logprobs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
}


def response(body: Json, names: Sequence[str]) -> AskedChat:
    name = served_name(body, names)
    for field_name, harmless in STATEFUL.items():
        if body.get(field_name) is not None and body[field_name] not in harmless:
            raise HttpRefused(f"{field_name} is not supported", param=field_name, code="unsupported_parameter")
    params = sampling(body, token_bound(body, "max_output_tokens"), None)
    if params.n != 1:
        raise wrong("n", "1", params.n)
    first = (
        [{"role": "system", "content": text(body["instructions"], "instructions")}]
        if body.get("instructions")
        else []
    )
    return AskedChat(
        name,
        params,
        stream=boolean(body, "stream"),
        schema=text_format(body),
        messages=[*first, *conversation(body.get("input"))],
        template_options=template_options(body),
    )


def conversation(given: object) -> list[dict[str, Any]]:
    """A text, or messages; of other items (calls, reasoning) none is supported."""
    if isinstance(given, str):
        return [{"role": "user", "content": text(given, "input")}]
    if not isinstance(given, list) or not given:
        raise wrong("input", "a string or a list of at least one message", given)
    return [item(one, f"input[{index}]") for index, one in enumerate(given)]


def item(given: object, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise wrong(where, "an object", given)
    role = given.get("role")
    if given.get("type", "message") != "message" or not isinstance(role, str) or role not in ROLES:
        raise HttpRefused(f"{where}: only messages are supported, with a role of {', '.join(ROLES)}", param=where)
    parts = given.get("content")
    if isinstance(parts, list):
        known = [isinstance(part, Mapping) and part.get("type") in TEXTS for part in parts]
        parts = [{**part, "type": "text"} if fine else part for part, fine in zip(parts, known, strict=True)]
    return message({"role": role, "content": parts}, where)


@dataclass(frozen=True)
class ResponseFormat:
    """body: what was asked, of which the response repeats some."""

    asked: AskedChat
    id: str
    created: int
    prompt: int  # tokens
    body: Json
    keeps: bool = True  # the last events have the whole text
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        piece, reason = choice.whole(), choice.whole().finish_reason
        cut = {"reason": "max_output_tokens"} if reason == "length" else None
        return self.state(
            "incomplete" if cut else "completed",
            output=[self.message(piece.text, "incomplete" if cut else "completed")],
            incomplete_details=cut,
            usage=self.usage(choices),
        )

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
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": mapping(mapping(asked, "text"), "format") or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        } | more

    def message(self, text: str | None, status: str) -> dict[str, Any]:
        """text=None: its content has not begun."""
        content = [] if text is None else [self.part(text)]
        return {"id": self.message_id, "type": "message", "status": status, "role": "assistant", "content": content}

    @property
    def message_id(self) -> str:
        return f"msg_{self.id}"

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        found = answers.usage(self.prompt, choices)
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": {**found["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": found["total_tokens"],
        }

    def event(self, kind: str, **more: Any) -> bytes:
        body = {"type": f"response.{kind}", "sequence_number": next(self.numbers), **more}
        return f"event: response.{kind}\n".encode() + answers.event(body)

    def begin(self) -> bytes:
        at = {"output_index": 0}
        return b"".join(
            (
                self.event("created", response=self.state("in_progress")),
                self.event("in_progress", response=self.state("in_progress")),
                self.event("output_item.added", **at, item=self.message(None, "in_progress")),
                self.event("content_part.added", **at, **self.site, part=self.part("")),
            )
        )

    @property
    def site(self) -> dict[str, Any]:
        return {"item_id": self.message_id, "content_index": 0}

    def chunk(self, choice: Choice, piece: Piece, choices: Sequence[Choice]) -> bytes:  # noqa: ARG002
        if not piece.text:
            return b""
        return self.event("output_text.delta", output_index=0, **self.site, delta=piece.text, logprobs=[])

    def end(self, choices: Sequence[Choice]) -> bytes:
        """The text once more, part by part, and then the response."""
        done = self.whole(choices)
        message, at = done["output"][0], {"output_index": 0}
        (part,) = message["content"]
        return b"".join(
            (
                self.event("output_text.done", **at, **self.site, text=part["text"], logprobs=[]),
                self.event("content_part.done", **at, **self.site, part=part),
                self.event("output_item.done", **at, item=message),
                self.event(done["status"], response=done),
            )
        )
