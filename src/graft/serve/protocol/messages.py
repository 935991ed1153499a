"""/v1/messages, Anthropic's API, which coding agents speak: what a client asks for, as a chat.

Anthropic's fields are turned into those of chat completions, and what can be checked by its own name is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graft.base.errors import HttpRefused
from graft.serve.protocol.message_blocks import system_text, turns_of
from graft.serve.protocol.requests import AskedChat, as_list, served_name, template_options
from graft.serve.protocol.sampling import sampling, token_bound
from graft.serve.protocol.scheduling import priority
from graft.serve.protocol.structure import AskedSchema, checked, the_one
from graft.serve.protocol.tools import AskedTools, asked_tools
from graft.serve.protocol.truncation import truncation
from graft.serve.protocol.values import Json, boolean, mapping, wrong

PATH = "/v1/messages"
ROLES = ("user", "assistant", "system")
# Whether it thinks is told to the template. For how long models cannot be told: budget_tokens is a wish, and left.
THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
REFUSED = ("container", "mcp_servers", "n", "prompt_logprobs", "logprobs", "echo")  # values that ask for nothing pass


def message_request(body: Json, names: Sequence[str], *, counting: bool = False) -> AskedChat:
    """counting: of /v1/messages/count_tokens, where nothing is generated."""
    name = served_name(body, names)
    for field in REFUSED:
        if body.get(field) not in (None, [], {}, False):
            raise HttpRefused(f"{field} is not supported", param=field, code="unsupported_parameter")
    most = token_bound(body, "max_tokens")
    if most is None and not counting:
        raise wrong("max_tokens", "a whole number of 1 or more", None)
    turns = conversation(body)
    continues = turns[-1]["role"] == "assistant"
    if continues and "tool_calls" in turns[-1]:
        raise HttpRefused("messages: calls need their results behind them", param="messages")
    tools, schema = message_tools(body), message_format(body)
    if tools is not None and tools.schema is not None:
        if schema is not None:
            raise HttpRefused(
                "output_config.format contradicts a tool_choice that asks for a call", param="tool_choice"
            )
        schema = tools.schema
    return AskedChat(
        name,
        sampling({**body, "stop": stop_sequences(body)}, most, None),
        stream=boolean(body, "stream") and not counting,
        schema=schema,
        truncation=truncation(body),
        priority=priority(body),
        messages=turns,
        template_options={**thinking(body), **template_options(body)},
        tools=tools,
        generation_prompt=not continues,
        continues=continues,
        clamped=True,
    )


def conversation(body: Json) -> list[dict[str, Any]]:
    """Turns of one role that follow each other are one, as templates want it; an empty last one is none."""
    found: list[dict[str, Any]] = []
    for one in said(body):
        before = found[-1] if found else {}
        if one["role"] == before.get("role") != "tool" and "tool_calls" not in before:
            texts = [text for text in (before["content"], one["content"]) if text]
            found[-1] = {**before, **one, "content": "\n".join(texts)}
        else:
            found.append(one)
    if found[-1] == {"role": "assistant", "content": ""}:
        found.pop()
    if not found or found[-1]["role"] == "system":
        raise HttpRefused("messages: there is nothing to answer", param="messages")
    return found


def said(body: Json) -> Iterator[dict[str, Any]]:
    """The system prompt is a message like others; one of Anthropic's may be several of ours."""
    if text := system_text(body.get("system")):
        yield {"role": "system", "content": text}
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise wrong("messages", "a list of at least one message", given)
    for index, one in enumerate(given):
        where = f"messages[{index}]"
        if not isinstance(one, Mapping):
            raise wrong(where, "an object", one)
        if one.get("role") not in ROLES:
            raise wrong(f"{where}.role", f"one of {', '.join(ROLES)}", one.get("role"))
        yield from turns_of(one["role"], one.get("content"), where)


def stop_sequences(body: Json) -> list[Any]:
    """Under our own name for them; what is in it is looked at there."""
    given = body.get("stop_sequences")
    return [] if given is None else as_list(given, "stop_sequences")


def thinking(body: Json) -> dict[str, bool]:
    """A variable of templates that can do without thoughts; others have no use for it."""
    given = mapping(body, "thinking")
    if not given:
        return {}
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in THINKING:
        raise wrong("thinking.type", f"one of {', '.join(THINKING)}", kind)
    return {"enable_thinking": THINKING[kind]}


def message_format(body: Json) -> AskedSchema | None:
    """{"output_config": {"format": {"type": "json_schema", "schema": {…}}}}, or vLLM's fields."""
    found = None
    for param, given in (
        ("output_config.format", mapping(mapping(body, "output_config"), "format")),
        ("output_format", mapping(body, "output_format")),  # its name before
    ):
        if given and given.get("type") != "json_schema":
            raise wrong(f"{param}.type", "json_schema", given.get("type"))
        if given and found is None:
            found = checked(given.get("schema"), f"{param}.schema")
    return the_one(body, found)


def message_tools(body: Json) -> AskedTools | None:
    """Tools with their input_schema, and whether one must be called."""
    choice = mapping(body, "tool_choice")
    made: dict[str, Any] = {"parallel_tool_calls": not boolean(choice, "disable_parallel_tool_use")}
    tools = body.get("tools")
    if tools is not None:
        made["tools"] = [as_function(one, f"tools[{n}]") for n, one in enumerate(as_list(tools, "tools"))]
    kind = choice.get("type")
    if kind == "tool":
        made["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif choice:
        if not isinstance(kind, str) or kind not in CHOICES:
            raise wrong("tool_choice.type", f"one of {', '.join(CHOICES)}, tool", kind)
        made["tool_choice"] = CHOICES[kind]
    return asked_tools(made)


def as_function(given: object, where: str) -> dict[str, Any]:
    """As chat completions have a tool. Those that Anthropic runs itself have a type and no schema."""
    if not isinstance(given, Mapping):
        raise wrong(where, "an object", given)
    if given.get("type") not in (None, "custom"):
        raise HttpRefused(
            f"{where}: only tools of the client's own are supported, with an input_schema, not {given['type']!r:.40}",
            param=where,
            code="unsupported_parameter",
        )
    schema = given.get("input_schema")
    if not isinstance(schema, Mapping):
        raise wrong(f"{where}.input_schema", "a JSON schema, an object", schema)
    kept = {name: given[name] for name in ("name", "description", "strict") if given.get(name) is not None}
    return {"type": "function", "function": {**kept, "parameters": schema}}
