"""truncate_prompt_tokens: what stays of a prompt that is too long, at every endpoint that takes it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.serve.generation import cut_prompt, from_completion
from graft.serve.protocol.truncation import Truncation, truncation
from protocol_cases import MESSAGES, TEXT, chat, completion, refused, respond
from serve_cases import chunks, complete, http_client, serving
from stub_engine import CONTEXT

LONG = list(range(20, 220))


@pytest.fixture(scope="module")
def client():
    with serving("chat") as server, http_client(server.url) as found:
        yield found


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 25), st.booleans(), st.integers(-3, 25))
def test_what_stays_is_an_end_of_the_prompt(ids, most, left, room):
    kept = Truncation(most, left).cut(ids, room)
    assert len(kept) == min(len(ids), most) and kept == (ids[len(ids) - len(kept) :] if left else ids[: len(kept)])
    fits = Truncation(-1, left).cut(ids, room)
    assert fits == Truncation(max(room, 1), left).cut(ids, 0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": "3"}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "middle"}, "truncation_side"),
        ({"truncation_side": ["left"]}, "truncation_side"),
    ],
)
def test_what_is_wrong_is_named(client, body, param):
    for ask in (completion, chat, respond):
        error = refused(lambda ask=ask: ask(**body))
        assert (error.status, error.param) == (400, param) and param in str(error)
    assert complete(client, LONG, **body).json()["error"]["param"] == param


def test_nothing_is_cut_where_nobody_asks():
    assert truncation({}) is None and truncation({"truncation_side": "left"}) is None
    assert refused(lambda: asyncio.run(from_completion(completion(prompt=LONG), TEXT, TEXT.model, "x")))


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_goes_on_from_what_stayed(client, stream):
    """The stub counts on from the last token of its prompt."""
    for asked, kept in (
        ({"truncate_prompt_tokens": 5}, LONG[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, LONG[:5]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 4}, LONG[-(CONTEXT - 4) :]),
        ({"truncate_prompt_tokens": 1000, "prompt": [9, 8]}, [9, 8]),
    ):
        body = {"return_token_ids": True, "stream": stream, **asked}
        answer = complete(client, body.pop("prompt", LONG), **body)
        assert answer.status_code == 200, answer.text
        found = chunks(answer.text.splitlines())[0] if stream else [answer.json()]
        choices = [one for part in found for one in part["choices"]]
        assert choices[0]["prompt_token_ids"] == kept
        tokens = [token for one in choices for token in one["token_ids"]]
        assert tokens == [kept[-1] + 1 + at for at in range(4)]


def test_what_is_echoed_is_what_stayed(client):
    text = "one two three, four five"
    ids = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    answer = complete(client, [text, ids], echo=True, truncate_prompt_tokens=3, logprobs=0, max_tokens=1).json()
    end = client.post("/detokenize", json={"tokens": ids[-3:]}).json()["prompt"]
    for choice in answer["choices"]:
        assert choice["text"].startswith(end) and len(choice["logprobs"]["tokens"]) == 4
    assert answer["usage"]["prompt_tokens"] == 6
    (uncut,) = complete(client, text, echo=True, truncate_prompt_tokens=1000).json()["choices"]
    assert uncut["text"].startswith(text)


def test_conversations_are_cut_behind_the_template(client):
    whole = asyncio.run(TEXT.chat(MESSAGES, generation=True, options={}))
    for ask in (chat, respond):
        asked = ask(truncate_prompt_tokens=4)
        assert asyncio.run(cut_prompt(asked, TEXT, TEXT.model)) == whole[-4:]
    body = {"messages": [{"role": "user", "content": "the quick brown fox " * 40}]}
    assert client.post("/v1/chat/completions", json=body).json()["error"]["code"] == "context_length_exceeded"
    for path, more in (
        ("/v1/chat/completions", body),
        ("/v1/responses", {"input": body["messages"]}),
        ("/v1/messages", {**body, "max_tokens": 40}),
    ):
        asked = {**more, "truncate_prompt_tokens": -1}
        answer = client.post(path, json=asked)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
        assert prompt == CONTEXT - 1, "beside one token of the answer, where it is as long as it may be"
    held = client.post("/v1/chat/completions", json={**body, "max_tokens": 7, "truncate_prompt_tokens": -1}).json()
    assert held["usage"]["prompt_tokens"] == CONTEXT - 7 and held["usage"]["completion_tokens"] == 7
