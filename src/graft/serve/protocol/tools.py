"""The functions that a model may call, as a chat request names them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graft.base.errors import HttpRefused
from graft.serve.protocol.structure import AskedSchema, call_schema, marked_call_schema
from graft.serve.protocol.values import Json, boolean, text, wrong

MOST_TOOLS = 128  # OpenAI's
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True)
class AskedTools:
    """tools: as templates take them. parallel: more than one call may be in an answer. schema: of the calls, where
    the answer must be some. strict: of calls that the model may make, where functions are strict."""

    tools: Sequence[Mapping[str, Any]]
    parallel: bool = True
    schema: AskedSchema | None = None
    strict: AskedSchema | None = None

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
    parallel, named = boolean(body, "parallel_tool_calls", True), choice not in (None, "auto", "required")
    wanted = [chosen(choice, found)] if named else found
    if choice not in (None, "auto"):
        schema = call_schema([one["function"] for one in wanted], parallel and not named)
        return AskedTools(found, parallel, schema)
    functions = [one["function"] for one in found]
    strict = any([boolean(one, "strict") for one in functions])  # a list: each is looked at
    return AskedTools(found, parallel, strict=marked_call_schema(functions, parallel) if strict else None)


def chosen(choice: object, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """{"type": "function", "function": {"name": "f"}}."""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if not isinstance(function, Mapping):
        raise wrong("tool_choice", "none, auto, required, or an object with a function", choice)
    name = function.get("name")
    found = next((one for one in tools if one["function"]["name"] == name), None)
    if found is None:
        raise HttpRefused(f"tool_choice: none of the tools is called {name!r:.80}", param="tool_choice")
    return found


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
    return {**given, "type": "function", "function": {**function}}
