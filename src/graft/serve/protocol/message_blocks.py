"""Blocks of Anthropic's messages as chat templates take them: text, calls and their results, thoughts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from graft.base.errors import HttpRefused
from graft.serve.protocol.requests import content
from graft.serve.protocol.values import Json, boolean, text, wrong

# The first block of an agent's system prompt may be one for Anthropic's accounts, other each time. It is nothing for
# a model, and with it no two prompts would begin alike, so that none would be found in the cache.
BILLING = "x-anthropic-billing-header:"


def system_text(given: object) -> str:
    """A text, or blocks of text."""
    if given is None:
        return ""
    if isinstance(given, list):
        given = [one for one in given if not (isinstance(one, Mapping) and is_billing(one.get("text")))]
    return content(given, "system") if given else ""


def is_billing(given: object) -> bool:
    return isinstance(given, str) and given.startswith(BILLING)


def turns_of(role: str, given: object, where: str) -> Iterator[dict[str, Any]]:
    """Results of calls are messages of their own, before what else the user says."""
    if not isinstance(given, list):
        yield {"role": role, "content": text(given, f"{where}.content")}
        return
    results, texts, calls, thoughts = [], [], [], []
    for index, block in enumerate(given):
        site = f"{where}.content[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append(text(block.get("text"), f"{site}.text"))
        elif kind == "tool_result" and role == "user":
            results.append(result(block, site))
        elif kind == "tool_use" and role == "assistant":
            calls.append(call(block, site))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(text(block.get("thinking"), f"{site}.thinking"))
        elif kind != "redacted_thinking" or role != "assistant":  # which says nothing to anybody else's model
            raise HttpRefused(
                f"{site}: blocks of {role} messages may be {allowed(role)}, not {kind!r:.40}", param=site
            )
    yield from results
    if texts or calls or thoughts or not results:
        made: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
        made |= {"tool_calls": calls} if calls else {}
        yield made | ({"reasoning_content": "\n".join(thoughts)} if thoughts else {})


def allowed(role: str) -> str:
    return {"user": "text or tool_result", "assistant": "text, tool_use or thinking"}.get(role, "text")


def call(block: Json, where: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, Mapping):
        raise wrong(f"{where}.input", "an object", given)
    name, made = text(block.get("name"), f"{where}.name"), text(block.get("id"), f"{where}.id")
    return {"id": made, "type": "function", "function": {"name": name, "arguments": dict(given)}}


def result(block: Json, where: str) -> dict[str, Any]:
    """One without a word says at least whether it failed."""
    given = block.get("content")
    said = content(given, f"{where}.content") if given else ""
    if not said and boolean(block, "is_error"):
        said = "error"
    return {"role": "tool", "tool_call_id": text(block.get("tool_use_id"), f"{where}.tool_use_id"), "content": said}
