"""logprobs in /v1/responses: those of a message's own tokens, in the answer as in its events."""

from __future__ import annotations

import json

import pytest

from graft.serve.protocol.responses import INCLUDED, LOGPROBS
from protocol_cases import refused, respond
from serve_cases import http_client, serving

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def client():
    """Its answers are what stands behind `say:`; each token's logprob is its number, in eighths, below zero."""
    with serving("thinker") as server, http_client(server.url) as found:
        yield found


def ask(client, said, **more):
    body = {"input": f"say:{said}", "include": [LOGPROBS], "temperature": 1, **more}
    return client.post("/v1/responses", json=body)


def events(answer):
    lines = answer.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def texts(logprobs):
    return "".join(one["token"] for one in logprobs)


def message_of(made):
    (found,) = [one for one in made["output"] if one["type"] == "message"]
    return found["content"][0]


def same_in_a_stream(client, said, **more):
    """The answer's message; its events have the same, piece by piece and at the end."""
    made = ask(client, said, **more).json()
    told = events(ask(client, said, stream=True, **more))
    whole = message_of(made)
    deltas = [one for one in told if one["type"] == "response.output_text.delta"]
    assert [each for one in deltas for each in one["logprobs"]] == whole["logprobs"]
    assert "".join(one["delta"] for one in deltas) == whole["text"]
    (done,) = [one for one in told if one["type"] == "response.output_text.done"]
    (part,) = [
        one["part"] for one in told if one["type"] == "response.content_part.done" and "logprobs" in one["part"]
    ]
    assert done["logprobs"] == part["logprobs"] == whole["logprobs"]
    assert message_of(told[-1]["response"]) == whole
    return made, whole


def test_every_token_of_a_message_has_its_logprob(client):
    made, whole = same_in_a_stream(client, "the quick 你好", top_logprobs=2)
    assert whole["text"] == "the quick 你好" and made["top_logprobs"] == 2
    *own, end = whole["logprobs"]
    assert [one["logprob"] for one in whole["logprobs"]] == [-n / 8 for n in range(1, len(own) + 2)]
    assert end["token"] == "<|im_end|>", "the token that ends the answer is told, as in chat completions"
    assert all(set(one) == {"token", "logprob", "bytes", "top_logprobs"} for one in own)
    assert all(one["top_logprobs"][0]["logprob"] == one["logprob"] and len(one["top_logprobs"]) == 2 for one in own)
    _, bare = same_in_a_stream(client, "the quick 你好")
    assert [one["top_logprobs"] for one in bare["logprobs"]] == [[]] * len(whole["logprobs"])


def test_they_are_those_of_chat_completions(client):
    whole = message_of(ask(client, "one two three", top_logprobs=1).json())
    chat = {"messages": [{"role": "user", "content": "say:one two three"}], "logprobs": True, "top_logprobs": 1}
    (choice,) = client.post("/v1/chat/completions", json={**chat, "temperature": 1}).json()["choices"]
    assert whole["logprobs"] == choice["logprobs"]["content"]


def test_nobody_asks_and_there_are_none(client):
    for more in ({"include": []}, {"include": None}, {"include": ["reasoning.encrypted_content"]}):
        made = ask(client, "one", **more).json()
        assert message_of(made)["logprobs"] == [] and made["top_logprobs"] == 0


def test_thoughts_and_calls_keep_theirs_to_themselves(client):
    made, whole = same_in_a_stream(client, "<think>\nhm, so\n</think>\n\none two")
    assert [one["type"] for one in made["output"]] == ["reasoning", "message"]
    assert texts(whole["logprobs"][:-1]).strip() == whole["text"] == "one two"
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    made, whole = same_in_a_stream(client, f"I ask: {call}", tools=[TOOL])
    assert [one["type"] for one in made["output"]] == ["message", "function_call"]
    assert texts(whole["logprobs"]).strip() == whole["text"].strip() == "I ask:"
    assert [one["type"] for one in ask(client, call, tools=[TOOL]).json()["output"]] == ["function_call"]


def test_an_empty_answer_has_its_end(client):
    _, whole = same_in_a_stream(client, "")
    assert whole["text"] == "" and texts(whole["logprobs"]) == "<|im_end|>"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"include": "message.output_text.logprobs"}, "include"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"include": [[]]}, "include"),
        ({"include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs"),
        ({"include": [LOGPROBS], "top_logprobs": "2"}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_what_is_wrong_is_named(client, body, param):
    error = refused(lambda: respond(**body))
    assert (error.status, error.param) == (400, param) and param in str(error)
    answer = client.post("/v1/responses", json={"input": "hi", **body})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_what_may_be_included():
    assert respond(include=list(INCLUDED), top_logprobs=3).params.logprobs == 3
    assert respond(include=[LOGPROBS]).params.logprobs == 0 and respond(top_logprobs=0).params.logprobs is None
