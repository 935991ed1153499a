"""/v1/messages: Anthropic's API over the same engine."""

from __future__ import annotations

import json
import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.base.errors import HttpRefused
from graft.serve.protocol.messages import message_request
from graft.serve.tools.prefix import whole_members
from serve_cases import http_client, serving

TOOL = {"name": "f", "description": "does", "input_schema": {"type": "object", "properties": {"a": {}}}}
USER = {"role": "user", "content": "hi"}


def asked(*messages, **more):
    return message_request({"messages": list(messages), "max_tokens": 5, **more}, ["m"])


def test_a_conversation_becomes_what_templates_take():
    found = asked(
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "redacted_thinking", "data": "?"},
            {"type": "text", "text": "see"}, {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "ok"}]},
            {"type": "tool_result", "tool_use_id": "c2", "is_error": True}, {"type": "text", "text": "go on"}]},
        system=[{"type": "text", "text": "x-anthropic-billing-header: v1", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "be brief"}],
        tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        stop_sequences=["end"], top_k=3, thinking={"type": "disabled"}, metadata={"user_id": "u"},
    )  # fmt: skip
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert found.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one\ntwo\nthree"},
        {"role": "assistant", "content": "see", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        {"role": "tool", "tool_call_id": "c2", "content": "error"},
        {"role": "user", "content": "go on"},
    ]
    assert found.tools.tools[0]["function"]["parameters"] == TOOL["input_schema"] and not found.tools.parallel
    assert found.params.stop == ("end",) and found.params.top_k == 3 and found.params.temperature == 1
    assert found.template_options == {"enable_thinking": False} and found.generation_prompt and not found.continues


def test_a_last_message_of_the_assistant_is_gone_on_with():
    found = asked(USER, {"role": "assistant", "content": "The best answer is ("})
    assert found.continues and not found.generation_prompt
    empty = asked(USER, {"role": "assistant", "content": []})
    assert not empty.continues and empty.generation_prompt and len(empty.messages) == 1


def test_tools_that_must_be_called():
    assert asked(USER, tools=[TOOL], tool_choice={"type": "any"}).schema.schema["minItems"] == 1
    named = asked(USER, tools=[TOOL], tool_choice={"type": "tool", "name": "f"}).schema.schema
    assert named["maxItems"] == 1
    assert asked(USER, tools=[TOOL], tool_choice={"type": "none"}).tools is None
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    formed = asked(USER, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})
    assert formed.schema.schema == schema and formed.schema.param == "output_config.format.schema"


WRONG = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
     "messages[0].content[0].input"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
     "messages"),
    ({"messages": [{"role": "assistant", "content": ""}]}, "messages"),
    ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"),
    ({"system": 5}, "system"), ({"system": [{"type": "image"}]}, "system"),
    ({"stop_sequences": "a"}, "stop_sequences"), ({"temperature": -1}, "temperature"),
    ({"tools": {}}, "tools"), ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "x"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"thinking": {"type": 1}}, "thinking.type"), ({"mcp_servers": [{}]}, "mcp_servers"), ({"n": 2}, "n"),
    ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}}}, "tools": [TOOL],
      "tool_choice": {"type": "any"}}, "tool_choice"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), WRONG)
def test_what_is_wrong_is_named(body, param):
    with pytest.raises(HttpRefused) as refused:
        message_request({"messages": [USER], "max_tokens": 5, **body}, ["m"])
    assert refused.value.param == param and refused.value.status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def part_of(found, whole):
    """Whether it is the beginning of it."""
    if isinstance(found, dict):
        pairs = zip(found.items(), whole.items(), strict=False)
        return len(found) <= len(whole) and all(a == c and part_of(b, d) for (a, b), (c, d) in pairs)
    if isinstance(found, list):
        return len(found) <= len(whole) and all(part_of(a, b) for a, b in zip(found, whole, strict=False))
    return found == whole


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=4), st.sampled_from([None, 1]))
def test_an_object_that_breaks_off_has_what_came_whole(value, indent):
    text, before = json.dumps(value, indent=indent), {}
    for at in range(len(text) + 1):
        found = whole_members(text[:at])
        assert part_of(found, value) and part_of(before, found), text[:at]
        before = found
    assert before == value


@pytest.fixture(scope="module")
def client():
    headers = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
    with serving("thinker", "--api-key", "secret") as server, http_client(server.url, headers=headers) as found:
        yield found


def post(client, text, **more):
    message = {"role": "user", "content": f"say:{text}"}
    return client.post("/v1/messages", json={"messages": [message], "max_tokens": 500, "tools": [TOOL], **more})


def events(answer):
    """Each with the kind in its own line and in its data."""
    found = []
    for one in answer.text.strip().split("\n\n"):
        kind, data = one.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


def put_together(told):
    """As Anthropic's own client does it."""
    blocks, last = [], None
    for one in told:
        assert one["type"] != "content_block_delta" or last == one["index"]  # a block is open while it has deltas
        if one["type"] == "content_block_start":
            assert last is None and one["index"] == len(blocks)
            blocks.append(one["content_block"] | ({"input": ""} if "input" in one["content_block"] else {}))
            last = one["index"]
        elif one["type"] == "content_block_delta":
            delta = one["delta"]
            name = {"input_json_delta": "input"}.get(delta["type"], delta["type"].removesuffix("_delta"))
            blocks[-1][name] += delta["partial_json" if name == "input" else name]
        elif one["type"] == "content_block_stop":
            assert last == one["index"]
            last = None
    assert last is None
    return [{**one, "input": whole_members(one["input"])} if "input" in one else one for one in blocks]


def bare(blocks):
    return [{name: value for name, value in one.items() if name != "id"} for one in blocks]


THOUGHT = {"type": "thinking", "thinking": "hm", "signature": ""}
CALL = {"type": "tool_use", "name": "f", "input": {"a": "naïve"}}
SAID = [
    ("just text", {}, [{"type": "text", "text": "just text"}], "end_turn", None),
    ('<think>hm</think>See: <tool_call>{"name": "f", "arguments": {"a": "naïve"}}</tool_call>'
     '<tool_call>{"name": "f", "arguments": {}}</tool_call>', {},
     [THOUGHT, {"type": "text", "text": "See:"}, CALL, {**CALL, "input": {}}], "tool_use", None),
    ("", {}, [], "end_turn", None),
    ('<tool_call>{"name": "f", "arguments": {"a": 1, "b": "cut', {}, [{**CALL, "input": {"a": 1}}], "end_turn", None),
    ("one two", {"max_tokens": 2}, None, "max_tokens", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "more", "content", "reason", "sequence"), SAID)
def test_answers_whole_and_streamed(client, text, more, content, reason, sequence):
    whole = post(client, text, **more).json()
    assert whole["type"] == "message" and whole["role"] == "assistant" and whole["id"].startswith("msg_")
    assert content is None or bare(whole["content"]) == content
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    first, *middle, delta, last = events(post(client, text, stream=True, **more))
    assert first["type"] == "message_start" and first["message"]["content"] == [] and last == {"type": "message_stop"}
    assert bare(put_together(middle)) == bare(whole["content"])
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert delta["usage"] == whole["usage"] and whole["usage"]["output_tokens"] > 0
    body = {"messages": [{"role": "user", "content": f"say:{text}"}], "tools": [TOOL]}
    counted = client.post("/v1/messages/count_tokens", json=body).json()
    assert counted == {"input_tokens": whole["usage"]["input_tokens"]} == {
        "input_tokens": first["message"]["usage"]["input_tokens"]
    }  # fmt: skip


def test_thoughts_where_the_template_is_told(client):
    """Its prompt then ends with the opening mark."""
    told = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert bare(post(client, "hm</think>yes", **told).json()["content"]) == [THOUGHT, {"type": "text", "text": "yes"}]
    (plain,) = post(client, "hm</think>yes", thinking={"type": "disabled"}).json()["content"]
    assert plain["text"] == "hm</think>yes"


def test_more_is_asked_for_than_there_is_room(client):
    """As Anthropic's: the answer ends where the context does; a prompt that fills it is refused, in words that agents
    know."""
    long = post(client, "a" * 3000, max_tokens=100_000)
    assert long.status_code == 400 and long.json()["error"]["message"].startswith("prompt is too long: ")
    some = post(client, "b" * 1500, max_tokens=100_000).json()
    assert some["stop_reason"] == "model_context_window_exceeded"
    used = some["usage"]
    assert used["input_tokens"] + used["output_tokens"] == 2000


def test_errors_have_anthropics_shape(client):
    for answer, status, kind in (
        (client.post("/v1/messages", content=b"{"), 400, "invalid_request_error"),
        (post(client, "x", model="other"), 404, "not_found_error"),
        (client.get("/v1/messages"), 405, "invalid_request_error"),
        (post(client, "x", max_tokens=None), 400, "invalid_request_error"),
        (client.post("/v1/messages", json={}, headers={"x-api-key": "no"}), 401, "authentication_error"),
        (client.post("/v1/messages/count_tokens", json={}), 400, "invalid_request_error"),
        (client.post("/v1/messages", content=b"x" * (5 << 20)), 413, "request_too_large"),
    ):
        found = answer.json()
        assert answer.status_code == status and answer.headers["request-id"], found
        assert set(found) == {"type", "error"} and found["type"] == "error"
        assert found["error"]["type"] == kind and found["error"]["message"]
    assert client.post("/v1/chat/completions", content=b"{").json()["error"]["code"] is None  # OpenAI's stays


def test_a_stream_that_breaks_off_ends_with_anthropics_event():
    message = {"role": "user", "content": "say:" + "word " * 300}
    body = {"messages": [message], "max_tokens": 1500, "stream": True}
    with serving("thinker") as server, http_client(server.url) as client:
        with client.stream("POST", "/v1/messages", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: message_start"
            os.kill(server.engine, signal.SIGKILL)
            *_, kind, data = (line for line in lines if line)
        told = json.loads(data.removeprefix("data: "))
        assert kind == "event: error" and told["type"] == "error"
        assert told["error"]["type"] == "overloaded_error" and "SIGKILL" in told["error"]["message"]
        again = client.post("/v1/messages", json=body | {"stream": False})
        assert again.status_code == 503 and again.json()["error"]["type"] == "overloaded_error"


def test_a_key_may_come_by_either_header(client):
    for headers in ({"x-api-key": "secret"}, {"x-api-key": "no", "Authorization": "Bearer secret"}):
        assert client.get("/v1/models", headers=headers).status_code == 200
    for headers in (
        {"x-api-key": ""},
        {"x-api-key": "Bearer secret"},
        {"x-api-key": "no", "Authorization": "secret"},
    ):
        assert client.get("/v1/models", headers=headers).status_code == 401
