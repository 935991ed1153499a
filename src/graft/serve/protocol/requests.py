"""What a client asks for, as OpenAI's completions and chat completions have it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graft.base.errors import HttpRefused
from graft.engine.params import MOST_LOGPROBS, SamplingParams
from graft.serve.protocol.sampling import UNBOUNDED, chat_logprobs, sampling, token_bound
from graft.serve.protocol.scheduling import priority
from graft.serve.protocol.structure import AskedSchema, asked_format
from graft.serve.protocol.tools import AskedTools, asked_tools
from graft.serve.protocol.truncation import Truncation, truncation
from graft.serve.protocol.values import Json, boolean, mapping, text, token_ids, whole, wrong

DEFAULT_MAX_TOKENS = 16  # OpenAI's, of completions
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
KEPT = ("name", "tool_call_id", "reasoning_content")  # of a message, for templates that show them
RESERVED = {  # of the function that renders templates
    "messages", "tools", "documents", "add_generation_prompt", "conversations", "chat_template",
    "continue_final_message", "return_assistant_tokens_mask", "self",
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What chat and completions have in common."""

    model: str
    params: SamplingParams
    stream: bool = False
    include_usage: bool = False
    usage_in_chunks: bool = False
    return_token_ids: bool = False  # vLLM's: beside the text
    prompt_logprobs: bool = False  # vLLM's: in a field of their own
    schema: AskedSchema | None = None  # what the answer must be
    truncation: Truncation | None = None  # of a prompt that is too long
    priority: int = 0  # lower goes first


@dataclass(frozen=True)
class AskedCompletion(Asked):
    prompts: Sequence[str | list[int]] = ()
    echo: bool = False
    silent: bool = False  # max_tokens is 0: the prompt alone, and how likely it is


@dataclass(frozen=True)
class AskedChat(Asked):
    messages: Sequence[Mapping[str, Any]] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    tools: AskedTools | None = None
    generation_prompt: bool = True
    continues: bool = False  # the last message is the beginning of the answer
    clamped: bool = False  # max_tokens may be more than there is room for


def served_name(body: Json, names: Sequence[str]) -> str:
    """The model's name as the client knows it; it may be left out."""
    name = body.get("model")
    if name is None:
        return names[0]
    if text(name, "model") not in names:
        known = ", ".join(names)
        raise HttpRefused(
            f"there is no model {name!r} here; known: {known}", param="model", status=404, code="model_not_found"
        )
    return name


def streaming(body: Json) -> dict[str, bool]:
    stream, options = boolean(body, "stream"), mapping(body, "stream_options")
    if options and not stream:
        raise HttpRefused("stream_options needs stream: true", param="stream_options")
    usage, each = boolean(options, "include_usage"), boolean(options, "continuous_usage_stats")
    ids, scored = boolean(body, "return_token_ids"), body.get("prompt_logprobs") is not None
    if scored and stream:
        raise HttpRefused("prompt_logprobs: only whole answers have them, not streams", param="prompt_logprobs")
    return {
        "stream": stream, "include_usage": usage, "usage_in_chunks": usage and each, "return_token_ids": ids,
        "prompt_logprobs": scored,
    }  # fmt: skip


def completion(body: Json, names: Sequence[str], vocabulary: int) -> AskedCompletion:
    name = served_name(body, names)
    logprobs, echo = whole(body, "logprobs", 0, MOST_LOGPROBS), boolean(body, "echo")
    if body.get("tools") not in (None, []):
        raise HttpRefused("tools: only chat completions have them", param="tools", code="unsupported_parameter")
    silent = echo and whole(body, "max_tokens", 0, UNBOUNDED - 1) == 0
    most = 1 if silent else token_bound(body, "max_tokens") or DEFAULT_MAX_TOKENS
    params = sampling(body, most, logprobs)
    if echo and logprobs is not None and (params.prompt_logprobs or 0) <= logprobs:
        params = replace(params, prompt_logprobs=logprobs)
    given, schema = prompts(body.get("prompt"), vocabulary), asked_format(body)
    return AskedCompletion(
        name,
        params,
        **streaming(body),
        schema=schema,
        truncation=truncation(body),
        priority=priority(body),
        prompts=given,
        echo=echo,
        silent=silent,
    )


def prompts(given: object, vocabulary: int, param: str = "prompt") -> list[str | list[int]]:
    """A string, a list of token ids, or a list of either."""
    if isinstance(given, str):
        return [text(given, param)]
    if not isinstance(given, list) or not given:
        raise wrong(param, "a string, a list of token ids, or a list of either", given)
    if isinstance(given[0], int):
        return [token_ids(given, param, vocabulary)]
    return [text(one, param) if isinstance(one, str) else token_ids(one, param, vocabulary) for one in given]


def chat(body: Json, names: Sequence[str]) -> AskedChat:
    name = served_name(body, names)
    most = token_bound(body, "max_completion_tokens", "max_tokens")
    if boolean(body, "echo"):
        raise HttpRefused("echo: only completions have it", param="echo", code="unsupported_parameter")
    params = sampling(body, most, chat_logprobs(body))
    tools, schema = asked_tools(body), asked_format(body)
    if tools is not None and tools.schema is not None:
        if schema is not None:
            raise HttpRefused(
                "response_format contradicts a tool_choice that asks for a call", param="response_format"
            )
        schema = tools.schema
    said = messages(body.get("messages"))
    return AskedChat(
        name,
        params,
        **streaming(body),
        schema=schema,
        truncation=truncation(body),
        priority=priority(body),
        messages=said,
        template_options=template_options(body),
        tools=tools,
        **turn(body, said),
    )


def turn(body: Json, said: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Whether an answer begins a turn, or goes on with the last message."""
    continues = boolean(body, "continue_final_message")
    generation = boolean(body, "add_generation_prompt", not continues)
    if continues and (generation or "tool_calls" in said[-1]):
        why = "contradicts add_generation_prompt" if generation else "needs a last message without tool_calls"
        raise HttpRefused(f"continue_final_message {why}", param="continue_final_message")
    return {"generation_prompt": generation, "continues": continues}


def template_options(body: Json) -> Json:
    given = mapping(body, "chat_template_kwargs")
    if taken := sorted(RESERVED & set(given)):
        raise HttpRefused(f"chat_template_kwargs may not have {taken[0]!r}", param="chat_template_kwargs")
    return {**effort(body), **given}


def effort(body: Json) -> Json:
    """How hard to think, by the names of chat completions, responses and Anthropic: a variable of templates (gpt-oss)
    that others have no use for."""
    found = {"reasoning_effort": body.get("reasoning_effort")}
    for name in ("reasoning", "output_config"):  # other than objects they are unknown fields like others
        given = body.get(name)
        found[f"{name}.effort"] = given.get("effort") if isinstance(given, Mapping) else None
    return next(({"reasoning_effort": text(value, param)} for param, value in found.items() if value is not None), {})


def messages(given: object) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise wrong("messages", "a list of at least one message", given)
    return [message(one, f"messages[{index}]") for index, one in enumerate(given)]


def message(given: object, where: str) -> dict[str, Any]:
    """As templates take it: developer is system, parts are one text, the arguments of tool calls are objects."""
    if not isinstance(given, Mapping):
        raise wrong(where, "an object", given)
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{where}.role", f"one of {', '.join(ROLES)}", role)
    made: dict[str, Any] = {"role": ROLES[role]}
    calls = given.get("tool_calls")
    if given.get("content") is None and role == "assistant":
        made["content"] = ""
    else:
        made["content"] = content(given.get("content"), f"{where}.content")
    if calls:
        made["tool_calls"] = [tool_call(one, f"{where}.tool_calls") for one in as_list(calls, f"{where}.tool_calls")]
    return made | {name: text(given[name], f"{where}.{name}") for name in KEPT if given.get(name) is not None}


def as_list(given: object, where: str) -> list[Any]:
    if not isinstance(given, list):
        raise wrong(where, "a list", given)
    return given


def content(given: object, where: str) -> str:
    """Text, or parts of text, which are joined by a line break as in vLLM."""
    if isinstance(given, str):
        return text(given, where)
    if not isinstance(given, list):
        raise wrong(where, "a string or a list of parts", given)
    texts = []
    for part in given:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise HttpRefused(f"{where}: only parts of type 'text' are supported, not {kind!r:.40}", param=where)
        texts.append(text(part.get("text"), where))
    return "\n".join(texts)


def tool_call(given: object, where: str) -> dict[str, Any]:
    """One that the assistant made earlier."""
    called = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(called, Mapping):
        raise wrong(where, "a list of objects with a function", given)
    arguments = called.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(text(arguments, where) or "{}")
        except (ValueError, RecursionError) as error:
            raise HttpRefused(f"{where}: arguments are not valid JSON: {error}", param=where) from error
    return {**given, "function": {**called, "arguments": arguments}}
