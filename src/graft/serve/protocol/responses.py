"""/v1/responses, OpenAI's newer API: what a client asks for. A conversation with calls and their results, and tools.

Nothing is stored: `previous_response_id` and `conversation` are refused, the client sends what was said before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graft.base.errors import HttpRefused
from graft.engine.params import MOST_LOGPROBS
from graft.serve.protocol.requests import (
    ROLES,
    AskedChat,
    as_list,
    message,
    served_name,
    template_options,
    tool_call,
)
from graft.serve.protocol.sampling import sampling, token_bound
from graft.serve.protocol.scheduling import priority
from graft.serve.protocol.structure import text_format
from graft.serve.protocol.tools import asked_tools
from graft.serve.protocol.truncation import truncation
from graft.serve.protocol.values import Json, boolean, text, whole, wrong

TEXTS = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"
# what was thought is in the items as it is, and taken back from there: nothing has to be hidden in them
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
# field: values that ask for nothing
STATEFUL: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "prompt_logprobs": (),
}


def response(body: Json, names: Sequence[str]) -> AskedChat:
    name = served_name(body, names)
    for field_name, harmless in STATEFUL.items():
        if body.get(field_name) is not None and body[field_name] not in harmless:
            raise HttpRefused(f"{field_name} is not supported", param=field_name, code="unsupported_parameter")
    params = sampling(body, token_bound(body, "max_output_tokens"), text_logprobs(body))
    if params.n != 1:
        raise wrong("n", "1", params.n)
    first = (
        [{"role": "system", "content": text(body["instructions"], "instructions")}]
        if body.get("instructions")
        else []
    )
    tools, schema = asked_tools(nested(body)), text_format(body)
    if tools is not None and tools.schema is not None:
        if schema is not None:
            raise HttpRefused("text.format contradicts a tool_choice that asks for a call", param="text")
        schema = tools.schema
    return AskedChat(
        name,
        params,
        stream=boolean(body, "stream"),
        schema=schema,
        truncation=truncation(body),
        priority=priority(body),
        messages=[*first, *conversation(body.get("input"))],
        template_options=template_options(body),
        tools=tools,
    )


def text_logprobs(body: Json) -> int | None:
    """How many of the likeliest tokens are told beside each, where `include` asks for logprobs at all."""
    given = body.get("include")
    for one in [] if given is None else as_list(given, "include"):
        if one not in INCLUDED:
            known = " and ".join(INCLUDED)
            raise HttpRefused(
                f"include: only {known} are supported, not {one!r:.60}", param="include", code="unsupported_parameter"
            )
    top = whole(body, "top_logprobs", 0, MOST_LOGPROBS)
    if LOGPROBS in (given or ()):
        return top or 0
    if top:
        raise HttpRefused(f"top_logprobs needs include: [{LOGPROBS}]", param="top_logprobs")
    return None


def nested(body: Json) -> dict[str, Any]:
    """Tools and their choice as chat completions have them: the function in an object of its own."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if isinstance(tools, list):
        tools = [inner(one) for one in tools]
    return {**body, "tools": tools, "tool_choice": inner(choice)}


def inner(given: Any) -> Any:
    if not isinstance(given, Mapping) or given.get("type") != "function" or "function" in given:
        return given
    return {"type": "function", "function": {name: value for name, value in given.items() if name != "type"}}


def conversation(given: object) -> list[dict[str, Any]]:
    """A text, or items: messages, calls and their results, and what was thought before them."""
    if isinstance(given, str):
        return [{"role": "user", "content": text(given, "input")}]
    if not isinstance(given, list) or not given:
        raise wrong("input", "a string or a list of at least one message", given)
    found: list[dict[str, Any]] = []
    for index, one in enumerate(given):
        added = item(one, f"input[{index}]")
        if added["role"] == "assistant" and found and found[-1]["role"] == "assistant" and follows(found[-1], added):
            join(found[-1], added)
        else:
            found.append(added)
    return found


def follows(before: Json, added: Json) -> bool:
    """Whether two items are of one turn: thoughts come first, and calls last."""
    return (not before["content"] and "tool_calls" not in before) or "tool_calls" in added


def join(before: dict[str, Any], added: Json) -> None:
    calls = [*before.get("tool_calls", ()), *added.get("tool_calls", ())]
    before |= {**added, "content": before["content"] or added["content"]}
    if calls:
        before["tool_calls"] = calls


def item(given: object, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise wrong(where, "an object", given)
    kind = given.get("type", "message")
    if kind == "function_call":
        call = {"id": given.get("call_id"), "type": "function", "function": given}
        made = tool_call(call, where)
        named = {name: made["function"].get(name) for name in ("name", "arguments")}
        return {"role": "assistant", "content": "", "tool_calls": [{**made, "function": named}]}
    if kind == "function_call_output":
        output = {"role": "tool", "tool_call_id": given.get("call_id"), "content": as_text(given.get("output"))}
        return message(output, where)
    if kind == "reasoning":
        return {"role": "assistant", "content": "", "reasoning_content": thought(given, where)}
    role = given.get("role")
    if kind != "message" or not isinstance(role, str) or role not in ROLES:
        raise HttpRefused(
            f"{where}: only messages, with a role of {', '.join(ROLES)}, function_call, function_call_output and"
            " reasoning are supported",
            param=where,
        )
    return message({"role": role, "content": as_text(given.get("content"))}, where)


def as_text(parts: object) -> object:
    """Parts by the names that chat completions have for them."""
    if not isinstance(parts, list):
        return parts
    known = [isinstance(part, Mapping) and part.get("type") in TEXTS for part in parts]
    return [{**part, "type": "text"} if fine else part for part, fine in zip(parts, known, strict=True)]


def thought(given: Json, where: str) -> str:
    """Of a reasoning item: its content, or else the summary."""
    parts = given.get("content") or given.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise wrong(f"{where}.content", "a list of parts", parts)
    return "".join(text(part.get("text"), where) for part in parts)
