"""The functions that a model may call, as a chat request names them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graft.base.errors import HttpRefused
from graft.serve.protocol.values import Json, boolean, text, wrong

MOST_TOOLS = 128  # OpenAI's
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
NEEDS_GRAMMAR = "a call cannot be enforced here: only none and auto are supported"


@dataclass(frozen=True)
class AskedTools:
    """tools: as templates take them. parallel: more than one call may be in an answer."""

    tools: Sequence[Mapping[str, Any]]
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)


def asked_tools(body: Json) -> AskedTools | None:
    """None: there are none, or tool_choice is none, and the model is told of none."""
    given, choice = body.get("tools"), body.get("tool_choice")
    if given is None or given == []:
        if choice not in (None, "none", "auto"):
            raise HttpRefused("tool_choice needs tools", param="tool_choice")
        return None
    if not isinstance(given, list) or len(given) > MOST_TOOLS:
        raise wrong("tools", f"a list of at most {MOST_TOOLS} tools", given)
    found = [tool(one, f"tools[{index}]") for index, one in enumerate(given)]
    names = [one["function"]["name"] for one in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise HttpRefused(f"tools: two functions are called {twice!r}", param="tools")
    if choice == "none":
        return None
    if choice not in (None, "auto"):
        raise HttpRefused(f"tool_choice: {NEEDS_GRAMMAR}", param="tool_choice", code="unsupported_parameter")
    return AskedTools(found, boolean(body, "parallel_tool_calls", True))


def tool(given: object, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    if (
        not isinstance(given, Mapping)
        or given.get("type", "function") != "function"
        or not isinstance(function, Mapping)
    ):
        raise HttpRefused(f"{where}: only tools of type 'function' are supported, with a function", param=where)
    name = text(function.get("name"), f"{where}.function.name")
    if not NAME.fullmatch(name):
        raise wrong(f"{where}.function.name", "1 to 64 letters, digits, dashes, dots or underscores", name)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise wrong(f"{where}.function.parameters", "a JSON schema, an object", parameters)
    if boolean(function, "strict"):
        raise HttpRefused(f"{where}.function.strict: {NEEDS_GRAMMAR}", param=where, code="unsupported_parameter")
    return {**given, "type": "function", "function": {**function}}
