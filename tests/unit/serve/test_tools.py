"""Tool calls: parsed from whatever pieces a text comes in, and over HTTP."""

from __future__ import annotations

import json
import re
from pathlib import Path

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.base.errors import HttpRefused, UsageError
from graft.engine.params import SamplingParams
from graft.serve.generation import strict_calls
from graft.serve.options import ModelOptions, ServeOptions
from graft.serve.protocol import requests
from graft.serve.protocol.choices import Choice
from graft.serve.text import ServedText
from graft.serve.tools.formats import FORMATS, HERMES, LLAMA3, MISTRAL, format_of
from graft.serve.tools.parser import CallDelta, ToolParser
from graft.serve.wire import AnswerRow, ServedModel
from serve_cases import PATIENCE, TEMPLATE, TOOL_TEMPLATE, http_client, serving, tokenizer_json

NAMES = ("f", "g")
HERE = '{"place": "Köln", "days": [1, 2.5e3, true, null], "note": "a \\"}\\" b"}'
SAMPLES = [
    (HERMES, f'<tool_call>\n{{"name": "f", "arguments": {HERE}}}\n</tool_call>', None, [("f", HERE)]),
    (HERMES, 'Let me see.\n<tool_call>{"arguments": {"a": 1}, "name": "g", "id": 3}</tool_call>\n'
             '<tool_call>\n{"name": "f"}\n</tool_call>', "Let me see.", [("g", '{"a": 1}'), ("f", "{}")]),
    (HERMES, '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</tool_call>', None,
     [("f", '{"a": 1}'), ("g", "{}")]),  # SmolLM's
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call> Hm.', " Hm.", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}\n{"name": "g", "arguments": {}}</tool_call>', None,
     [("f", "{}"), ("g", "{}")]),
    (HERMES, "no <tool call> here, and <tool_call", "no <tool call> here, and <tool_call", []),
    (HERMES, " \n", " \n", []),
    (HERMES, '<tool_call>{"name": "h", "arguments": {}}</tool_call>', ..., []),  # nobody's function
    (HERMES, "<tool_call>nothing</tool_call> at all", ..., []),
    (HERMES, '<tool_call>{"arguments": {"a": 1}}</tool_call>', ..., []),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "[1]}</tool_call>", [("f", "")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', None, [("f", '{"a": 1')]),  # cut off by max_tokens
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_xx> then', "</tool_xx> then", [("f", "{}")]),
    (LLAMA3, f'{{"name": "f", "parameters": {HERE}}}', None, [("f", HERE)]),
    (LLAMA3, '\n<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}', None,
     [("f", "{}"), ("g", '{"a": 1}')]),
    (LLAMA3, '{"answer": 42} is JSON, too', ..., []),
    (LLAMA3, "It is {this}.", "It is {this}.", []),
    (LLAMA3, '{"type": "function", "name": "f", "parameters": {}} more', "more", [("f", "{}")]),
    (MISTRAL, f'[TOOL_CALLS][{{"name": "f", "arguments": {HERE}}}, {{"name": "g", "arguments": {{}}}}]', None,
     [("f", HERE), ("g", "{}")]),
    (MISTRAL, f'Wait.[TOOL_CALLS]f[ARGS]{HERE}[TOOL_CALLS]g{{"a": 1}}', "Wait.", [("f", HERE), ("g", '{"a": 1}')]),
    (MISTRAL, "[TOOL_CALLS]h[ARGS]{}", ..., []),
]  # fmt: skip


def parsed(kind, pieces, **options):
    """Content and calls put together, in order."""
    parser = ToolParser(kind, NAMES, **options)
    found = [one for piece in pieces for one in parser.feed(piece)] + parser.finish()
    calls = {}
    for one in found:
        if isinstance(one, CallDelta):
            call = calls.setdefault(one.index, ["", ""])
            assert one.name is None or call == ["", ""], "a name comes once, and first"
            call[0] += one.name or ""
            call[1] += one.arguments
    return "".join(one for one in found if isinstance(one, str)), [tuple(calls[index]) for index in sorted(calls)]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), SAMPLES)
def test_every_cut_of_every_sample_is_the_same(kind, text, content, calls):
    whole = parsed(kind, [text])
    assert whole == (text if content is ... else content or "", calls)
    for at in range(len(text) + 1):
        assert parsed(kind, [text[:at], text[at:]]) == whole, at
    assert parsed(kind, text) == whole


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=4), JSON, max_size=3)), max_size=3
)


@given(CALLS, st.sampled_from([HERMES, LLAMA3, MISTRAL]), st.booleans(), st.data())
def test_what_is_written_is_read_in_any_pieces(calls, kind, ascii_only, data):
    written = [json.dumps(args, ensure_ascii=ascii_only) for _, args in calls]
    each = [f'{{"name": "{name}", "arguments": {args}}}' for (name, _), args in zip(calls, written, strict=True)]
    if kind is HERMES:
        text = "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in each)
    else:
        text = "; ".join(each) if kind is LLAMA3 else f"[TOOL_CALLS][{', '.join(each)}]" if each else ""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(kind, pieces) == ("", [(name, args) for (name, _), args in zip(calls, written, strict=True)])


MESS = st.text(alphabet='<tool_cal>/{}[]":,;namef arguments1\\', max_size=60)


@given(MESS, st.sampled_from([HERMES, LLAMA3, MISTRAL]), st.data())
def test_no_text_is_lost_or_depends_on_its_pieces(text, kind, data):
    head = data.draw(
        st.sampled_from(["", *kind.openings, f'{(kind.openings or ("",))[0]}{{"name": "f", "arguments": {{'])
    )
    text = head + text
    whole = parsed(kind, [text])
    at = data.draw(st.integers(0, len(text)))
    assert parsed(kind, [text[:at], text[at:]]) == whole == parsed(kind, text)
    if not whole[1]:
        assert whole[0] == text


def test_one_call_alone_where_parallel_calls_are_off():
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'
    assert parsed(HERMES, text, most=1) == ("", [("f", "{}")])


class Spelled:
    """A stream whose tokens are texts."""

    def feed(self, token):
        return token

    def finish(self):
        return ""


def ended(kind, text, stop=None, most=None):
    """finish_reason of an answer that the engine ended by a stop string, or by an end token."""
    choice = Choice(0, SamplingParams(), Spelled(), parser=ToolParser(kind, NAMES, most))
    return choice.take(AnswerRow(1, 0, [text] if stop else [text, ""], None, "stop", stop, 0, None)).finish_reason


CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("kind", "text", "most", "reason"),
    [
        (HERMES, CALL, None, "tool_calls"),
        (HERMES, CALL[:-3], None, "tool_calls"),  # the call itself is whole
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": "ab', None, "stop"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": oops}}</tool_call>', None, "stop"),
        (HERMES, CALL + '<tool_call>{"name": "g", "arguments": {', None, "stop"),
        (HERMES, CALL + '<tool_call>{"name": "g", "arguments": {', 1, "tool_calls"),  # the second is not shown
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": oops}}</tool_call>' + CALL, None, "stop"),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"x": 1}', None, "tool_calls"),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"x": 1', None, "stop"),
        (LLAMA3, '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "par', None, "stop"),
        (LLAMA3, '{"name": "f", "parameters": {"x": 1}}; {"na', None, "tool_calls"),  # the second was never told
    ],
)
def test_tool_calls_are_whole_where_the_reason_says_so(kind, text, most, reason):
    assert ended(kind, text, most=most) == ended(kind, text, "STOP", most) == reason


@given(CALLS, st.data())
def test_no_cut_off_call_ends_with_tool_calls(calls, data):
    text = "".join(
        f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(args)}}}</tool_call>' for name, args in calls
    )
    text = text[: data.draw(st.integers(0, len(text)))]
    if ended(HERMES, text) == "tool_calls":
        assert all(isinstance(json.loads(args), dict) for _, args in parsed(HERMES, [text])[1])


def test_formats_are_known_by_their_templates():
    assert (
        format_of("auto", "{{ tools }}<tool_call>") is HERMES and format_of("auto", "tools [TOOL_CALLS]") is MISTRAL
    )
    assert format_of("auto", 'tools "parameters"') is LLAMA3
    assert format_of("auto", "<tool_call> of a template that shows none") is format_of("auto", None) is None
    assert format_of("smollm", None) is HERMES and set(FORMATS) >= {"hermes", "llama3_json", "mistral", "smollm"}
    with pytest.raises(UsageError, match="did you mean 'hermes'"):
        ServeOptions(ModelOptions("m"), tool_call_parser="hermess")


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, "strict"),
        ({"tools": [TOOL], "tool_choice": "must"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"functions": [TOOL["function"]]}, "functions"),
    ],
)
def test_tools_that_are_refused(body, param):
    with pytest.raises(HttpRefused) as found:
        requests.chat({"messages": USER, **body}, ("m",))
    assert found.value.param == param and found.value.status == 400


def test_tools_that_are_none():
    for body in ({}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}, {"tool_choice": "none"}):
        assert requests.chat({"messages": USER, **body}, ("m",)).tools is None
    assert requests.chat({"messages": USER, "tools": [TOOL]}, ("m",)).tools.names == {"f"}


def strict_of(*functions, **body):
    tools = [{"type": "function", "function": one} for one in functions]
    return requests.chat({"messages": USER, "tools": tools, **body}, ("m",)).tools


def test_calls_of_strict_functions_are_held_to_their_schema():
    """Those of the others to any object; `$ref` follows its function into the whole."""
    inner = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
    found = strict_of({"name": "f", "parameters": inner, "strict": True}, {"name": "g", "parameters": inner})
    first, second = found.strict.schema["$defs"]["call"]["anyOf"]
    arguments = first["properties"]["arguments"]
    assert arguments["properties"]["x"] == {"$ref": "#/$defs/call/anyOf/0/properties/arguments/$defs/n"}
    assert second["properties"]["arguments"] == {"type": "object"} and found.schema is None
    assert "maxItems" not in found.strict.schema["anyOf"][1]
    alone = strict_of({"name": "f", "strict": True}, parallel_tool_calls=False)
    assert alone.strict.schema["anyOf"][1]["maxItems"] == 1
    assert strict_of({"name": "f"}).strict is None
    assert strict_of({"name": "f", "strict": True}, tool_choice="required").strict is None


def test_strict_calls_need_a_mark_before_them():
    tools = strict_of({"name": "f", "strict": True})
    assert strict_calls(tools, served(TOOL_TEMPLATE)).marks == ("<tool_call>", "</tool_call>")
    assert strict_calls(tools, served("{{ tools }}", "mistral")).marks == ("[TOOL_CALLS]", "")
    with pytest.raises(HttpRefused, match="llama3_json have no mark"):
        strict_calls(tools, served("{{ tools }}", "llama3_json"))
    assert strict_calls(None, served(TEMPLATE)) is None


def served(template, parser="auto"):
    return ServedText(ServedModel("mine", 64, 300, 1000, 4, tokenizer_json(), template, {}, ()), parser)


def test_templates_get_the_tools_and_one_without_refuses_them():
    shown = served(TOOL_TEMPLATE).render(USER, True, {}, [TOOL])
    assert '"name": "f"' in shown and shown.startswith("Use <tool_call>")
    assert "Use" not in served(TOOL_TEMPLATE).render(USER, True, {})
    for text in (served(TEMPLATE), served(TEMPLATE, "hermes"), served("{{ tools }}")):
        with pytest.raises(HttpRefused, match="--tool-call-parser"):
            _ = text.tool_format
    calls = [{"id": "x", "function": {"name": "f", "arguments": {"a": 1}}}]
    talk = [
        {"role": "system", "content": "Be brief."}, *USER, {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "42", "tool_call_id": "x"},
    ]  # fmt: skip
    shown = served(TEMPLATE, "smollm").render(talk, True, {}, [TOOL])
    assert shown.startswith("<|im_start|>system\nBe brief.\n\nYou are given") and '<tools>[{"name": "f"' in shown
    assert '<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>' in shown
    assert "user\n<tool_response>42</tool_response>" in shown


@pytest.fixture(scope="module")
def client():
    with serving("parrot") as server:
        found = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE)
        yield found
        found.close()


def say(text):
    return {"model": "parrot", "messages": [{"role": "user", "content": f"say:{text}"}], "tools": [TOOL]}


def test_calls_whole_and_streamed_by_openais_client(client):
    text = 'See:\n<tool_call>\n{"name": "f", "arguments": {"a": "naïve", "b": [1, 2]}}\n</tool_call>\n' \
           '<tool_call>{"name": "f", "arguments": {}}</tool_call>'  # fmt: skip
    whole = client.chat.completions.create(**say(text))
    type(whole).model_validate(whole.model_dump(), strict=True)
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "See:"
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert calls == [("f", {"a": "naïve", "b": [1, 2]}), ("f", {})]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    with client.chat.completions.stream(**say(text)) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls" and final.choices[0].message.content == "See:"
    again = final.choices[0].message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in again] == calls
    assert sum(event.type == "tool_calls.function.arguments.delta" for event in events) > 5  # piece by piece


def test_the_example_of_the_documentation_runs(client, capsys):
    """A parrot calls what it is told to."""
    (block,) = re.findall(r"```py\n(.*?)```", (Path(__file__).parents[3] / "docs" / "serve.md").read_text(), re.S)
    told = 'say:<tool_call>{"name": "get_weather", "arguments": {"place": "Oslo"}}</tool_call>'
    for old, new in (("http://127.0.0.1:8000/v1", str(client.base_url)), ("qwen3-8b", "parrot")):
        block = block.replace(old, new)
    exec(compile(block.replace('"Is it raining in Oslo?"', repr(told)), "docs/serve.md", "exec"), {})
    assert capsys.readouterr().out == 'get_weather {"place": "Oslo"}\n'


def test_raw_deltas_have_an_id_and_a_name_once(client):
    chunks = client.chat.completions.create(
        **say('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'), stream=True
    )
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [bool(one.id) for one in deltas] == [bool(one.function.name) for one in deltas] == [
        True, *[False] * (len(deltas) - 1)
    ]  # fmt: skip
    assert "".join(one.function.arguments for one in deltas) == '{"a": 1}' and {one.index for one in deltas} == {0}


def test_answers_without_calls_and_answers_that_are_cut_off(client):
    for text in (
        "just text",
        "<tool_call>oh</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    ):
        (choice,) = client.chat.completions.create(**say(text)).choices
        assert choice.message.content == text and choice.message.tool_calls is None and choice.finish_reason == "stop"
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    (cut,) = client.chat.completions.create(**say(text), max_tokens=30).choices
    assert cut.finish_reason == "length"
    (untold,) = client.chat.completions.create(**say(text), tool_choice="none").choices
    assert untold.message.content == text and untold.message.tool_calls is None


def test_a_server_whose_model_knows_no_tools():
    with serving("chat") as server, http_client(server.url) as plain:
        answer = plain.post("/v1/chat/completions", json={"messages": USER, "tools": [TOOL]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
        assert "--tool-call-parser" in answer.json()["error"]["message"]
