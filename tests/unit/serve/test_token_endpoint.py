"""/inference/v1/generate: token ids in, token ids out, whole and streamed, over an engine process without a model."""

from __future__ import annotations

import pytest

from graft.serve.protocol.token_requests import PATH, REFUSED
from serve_cases import chunks, http_client, serving
from stub_engine import CONTEXT, DIE


@pytest.fixture(scope="module")
def client():
    with serving("stub", "--restart") as server, http_client(server.url) as found:
        yield found


def ask(client, ids, sampling=None, **more):
    given = {"max_tokens": 4, "temperature": 1, **(sampling or {})}
    return client.post(PATH, json={"token_ids": ids, "sampling_params": given, **more})


def test_tokens_come_out(client):
    made = ask(client, [10, 20], request_id="mine", model="stub").json()
    assert made["request_id"] == "mine" and made["model"] == "stub" and made["prompt_token_ids"] is None
    (choice,) = made["choices"]
    assert choice == {
        "index": 0, "token_ids": [21, 22, 23, 24], "logprobs": None, "finish_reason": "length", "stop_reason": None,
    }  # fmt: skip
    usage = {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert made["usage"] == usage and "text" not in choice
    assert ask(client, [10], return_token_ids=True).json()["prompt_token_ids"] == [10]


def test_without_max_tokens_all_that_fits_comes(client):
    made = client.post(PATH, json={"token_ids": [10, 20], "sampling_params": {}}).json()
    assert len(made["choices"][0]["token_ids"]) == CONTEXT - 2
    assert len(client.post(PATH, json={"token_ids": [10, 20]}).json()["choices"][0]["token_ids"]) == CONTEXT - 2
    cut = ask(client, list(range(3, 203)), {"truncate_prompt_tokens": 2}, return_token_ids=True).json()
    assert cut["prompt_token_ids"] == [201, 202]


def test_a_stream_says_the_same(client):
    sampling = {"n": 2, "logprobs": 2}
    whole = ask(client, [10, 20], sampling).json()
    asked = {"stream": True, "stream_options": {"include_usage": True}, "request_id": "r", "return_token_ids": True}
    found, done = chunks(ask(client, [10, 20], sampling, **asked).text.splitlines())
    assert done and {one["request_id"] for one in found} == {"r"}
    assert found[-1] == {"request_id": "r", "choices": [], "usage": whole["usage"]}
    assert [one.get("prompt_token_ids") for one in found[:2]] == [[10, 20], None]
    for index, choice in enumerate(whole["choices"]):
        parts = [one["choices"][0] for one in found[:-1] if one["choices"][0]["index"] == index]
        assert [token for one in parts for token in one["token_ids"]] == choice["token_ids"]
        assert [each for one in parts for each in one["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert [one["finish_reason"] for one in parts] == [None] * 3 + ["length"]
    each = {"include_usage": True, "continuous_usage_stats": True}
    counted, _ = chunks(ask(client, [9], stream=True, stream_options=each).text.splitlines())
    told = [one["usage"]["completion_tokens"] for one in counted]
    assert len(told) == 5 and told == sorted(told) and told[-2:] == [4, 4]


def test_logprobs_have_token_ids(client):
    """The token itself comes first, whether it is among the likeliest or not."""
    content = ask(client, [20], {"logprobs": 2, "max_tokens": 1}).json()["choices"][0]["logprobs"]["content"]
    own = {"token": "token_id:21", "token_id": 21, "logprob": -0.5}
    assert content == [{**own, "top_logprobs": [own, {"token": "token_id:7", "token_id": 7, "logprob": -9999.0}]}]
    alone = ask(client, [20], {"logprobs": 0, "max_tokens": 1}).json()["choices"][0]["logprobs"]["content"]
    assert alone == [{**own, "top_logprobs": [own]}]
    scored = ask(client, [20, 40], {"prompt_logprobs": 1}).json()["prompt_logprobs"]
    assert scored[0] is None and scored[1]["40"]["logprob"] == -5.0 and scored[1]["40"]["rank"] == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "hi"}, "token_ids"),
        ({"token_ids": [1, "a"]}, "token_ids"),
        ({"token_ids": [300]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [5], "sampling_params": []}, "sampling_params"),
        ({"token_ids": [5], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": [5], "sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"token_ids": [5], "sampling_params": {"max_tokens": 99}}, "max_tokens"),
        ({"token_ids": [5], "sampling_params": {"logprobs": 21}}, "logprobs"),
        ({"token_ids": [5], "sampling_params": {"allowed_token_ids": []}}, "allowed_token_ids"),
        ({"token_ids": [5], "sampling_params": {"allowed_token_ids": [300]}}, "allowed_token_ids"),
        ({"token_ids": [5], "sampling_params": {"bad_words": [""]}}, "bad_words"),
        ({"token_ids": [5], "sampling_params": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
        ({"token_ids": [5], "stream_options": {"include_usage": True}}, "stream_options"),
        ({"token_ids": [5], "request_id": 7}, "request_id"),
        ({"token_ids": [5], "output_mode": "text"}, "output_mode"),
        ({"token_ids": [5], "priority": 3}, "priority"),  # of a server that takes requests in their order
        ({"token_ids": [5], "features": {"mm_hashes": {}}}, "features"),
        ({"token_ids": [5], "kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ],
)
def test_what_is_wrong_is_named(client, body, param):
    answer = client.post(PATH, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and param in error["message"]


def test_what_asks_for_nothing_passes(client):
    harmless = {"features": None, "priority": 0, "output_mode": "tokens", "kv_transfer_params": {}, "cache_salt": ""}
    assert set(harmless) <= {*REFUSED, "priority"}
    assert ask(client, [5], {"detokenize": False, "output_kind": 0}, **harmless).status_code == 200


def test_errors_are_those_of_all_endpoints(client):
    assert ask(client, [5], model="other").status_code == 404
    assert ask(client, [DIE]).status_code == 503
