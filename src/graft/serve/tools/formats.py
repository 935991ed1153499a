"""How families of models write calls. Names are those of vLLM's --tool-call-parser."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graft.base.errors import UsageError, near


@dataclass(frozen=True)
class ToolFormat:
    """openings: marks before calls. closing: the mark behind them. bare: a text that begins with these is a call.
    separator: between calls in a row. named: name[ARGS]{…} too. short_ids: nine letters, which its template wants.
    """

    name: str
    openings: tuple[str, ...]
    closing: str = ""
    bare: str = ""
    separator: str = ""
    named: bool = False
    short_ids: bool = False


HERMES = ToolFormat("hermes", ("<tool_call>",), "</tool_call>")  # Qwen, Hermes, SmolLM (a list in it)
LLAMA3 = ToolFormat("llama3_json", ("<|python_tag|>",), bare="{", separator=";")
MISTRAL = ToolFormat("mistral", ("[TOOL_CALLS]",), named=True, short_ids=True)
FORCED = ToolFormat("forced", (), bare="[")  # by a grammar, whatever the model is used to
FORMATS = {
    "hermes": HERMES, "qwen": HERMES, "smollm": HERMES, "llama3_json": LLAMA3, "llama4_json": LLAMA3,
    "mistral": MISTRAL,
}  # fmt: skip
AUTO = "auto"
# after SmolLM2's model card
DESCRIPTION = """You are given a question and a set of possible functions. Based on the question, make one or more
calls of functions to answer it, if any of them can be used; else answer by yourself. Calls are written in this form,
and nothing else:
<tool_call>[{"name": "func_name1", "arguments": {"argument1": "value1", "argument2": "value2"}}, ...]</tool_call>
You have these functions:
<tools>%s</tools>"""


def check_format(name: str) -> None:
    if name not in (AUTO, *FORMATS):
        raise UsageError(f"--tool-call-parser: unknown name {name!r}{near(name, [AUTO, *FORMATS])}")


def described(tools: Sequence[Mapping[str, Any]], conversation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation for a template without tools: they are in the system prompt, calls and results are text."""
    found = [as_text(message) for message in conversation]
    text = DESCRIPTION % json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if found and found[0]["role"] == "system":
        first, *found = found
        text = f"{first['content']}\n\n{text}"
    return [{"role": "system", "content": text}, *found]


def as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if calls := message.get("tool_calls"):
        made = [call["function"] for call in calls]
        shown = [{"name": one.get("name"), "arguments": one.get("arguments")} for one in made]
        text = f"<tool_call>{json.dumps(shown, ensure_ascii=False)}</tool_call>"
        return {"role": "assistant", "content": f"{message['content']}{text}"}
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>{message['content']}</tool_response>"}
    return dict(message)


def format_of(asked: str, template: str | None) -> ToolFormat | None:
    """By name; or by the marks in the chat template, of which Llama's has none but `"parameters"`."""
    if asked != AUTO:
        return FORMATS[asked]
    if template is None or "tools" not in template:
        return None
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    return LLAMA3 if "<|python_tag|>" in template or '"parameters"' in template else None
