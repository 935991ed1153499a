"""The HTTP process as a whole, over an engine process without a model: its endpoints."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_cases import chunks, complete, http_client, poll, running, sent, serving
from stub_engine import CONTEXT, HANG, QUEUED


@pytest.fixture(scope="module")
def server():
    with serving("stub") as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with http_client(server.url) as found:
        yield found


def test_answers_and_streams_say_the_same(client):
    whole = complete(client, [10, 20], n=2, logprobs=1).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert whole["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    asked = {"stream": True, "n": 2, "logprobs": 1, "stream_options": {"include_usage": True}}
    found, done = chunks(complete(client, [10, 20], **asked).text.splitlines())
    assert done and len({chunk["id"] for chunk in found}) == 1
    assert found[-1]["choices"] == [] and found[-1]["usage"] == whole["usage"]
    for index in (0, 1):
        parts = [chunk["choices"][0] for chunk in found[:-1] if chunk["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == whole["choices"][index]["text"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
        tokens = [token for part in parts for token in part["logprobs"]["tokens"]]
        assert tokens == whole["choices"][index]["logprobs"]["tokens"]


def test_several_prompts_and_echo(client):
    answers = complete(client, ["hello", "the quick"], echo=True).json()["choices"]
    assert answers[0]["text"].startswith("hello") and answers[1]["text"].startswith("the quick")


def test_how_likely_a_prompt_is(client):
    """As lm-eval asks: the prompt's own logprobs, before those of the answer, or without one."""
    asked = {"echo": True, "logprobs": 1, "temperature": 1, "n": 2}
    whole = complete(client, [16, 24, 32], **asked).json()
    streamed, done = chunks(complete(client, [16, 24, 32], **asked, stream=True).text.splitlines())
    assert done
    for index, choice in enumerate(whole["choices"]):
        told = choice["logprobs"]
        assert told["token_logprobs"] == [None, -3.0, -4.0, -0.5, -0.5, -0.5, -0.5]
        assert told["top_logprobs"][0] is None and len(told["top_logprobs"]) == len(told["tokens"]) == 7
        assert told["text_offset"] == [sum(map(len, told["tokens"][:at])) for at in range(7)]
        assert choice["text"] == "".join(told["tokens"])
        parts = [chunk["choices"][0] for chunk in streamed if chunk["choices"][0]["index"] == index]
        assert [one for part in parts for one in part["logprobs"]["token_logprobs"]] == told["token_logprobs"]
        assert [one for part in parts for one in part["logprobs"]["text_offset"]] == told["text_offset"]
        assert "".join(part["text"] for part in parts) == choice["text"]
    alone = complete(client, [[16, 24, 32], [8, 16]], echo=True, logprobs=0, max_tokens=0).json()
    assert [one["logprobs"]["token_logprobs"] for one in alone["choices"]] == [[None, -3.0, -4.0], [None, -2.0]]
    assert alone["usage"]["completion_tokens"] == 0 and alone["choices"][0]["finish_reason"] == "length"
    found = complete(client, [16, 24, 32], prompt_logprobs=1).json()["choices"][0]
    assert found["logprobs"] is None and found["prompt_logprobs"][0] is None
    seventh = {"logprob": -0.25, "rank": 1}
    for token, told in zip((24, 32), found["prompt_logprobs"][1:], strict=True):
        assert {k: v for k, v in told["7"].items() if k != "decoded_token"} == seventh
        assert told[str(token)]["logprob"] == -token / 8 and told[str(token)]["rank"] == 2


def test_what_the_model_cannot_do(client):
    biased = complete(client, [1], logit_bias={"300": 1})
    assert biased.status_code == 400 and "outside the vocabulary of 300" in biased.json()["error"]["message"]
    assert complete(client, [1], logit_bias={"299": -100}).status_code == 200
    none = client.post("/v1/embeddings", json={"input": "hi"})
    assert none.status_code == 400 and none.json()["error"]["code"] == "unsupported_endpoint"
    assert "graft serve stub --runner pooling" in none.json()["error"]["message"]
    assert client.post("/v1/responses", json={"input": "hi", "prompt_logprobs": 1}).status_code == 400
    allowed = complete(client, [1], allowed_token_ids=[299, 300])
    assert allowed.status_code == 400 and allowed.json()["error"]["param"] == "allowed_token_ids"
    ends = complete(client, [1], allowed_token_ids=[2], min_tokens=1)
    assert ends.status_code == 400 and ends.json()["error"]["param"] == "min_tokens"


def test_words_are_looked_at_before_the_engine_is_asked(client):
    for words, said in (
        (["a", ""], "at least one character"),
        (["x"] * 1025, "at most 1024"),
        ("the", "list of strings"),
    ):
        error = complete(client, [1], bad_words=words)
        assert error.status_code == 400 and error.json()["error"]["param"] == "bad_words", words
        assert said in error.json()["error"]["message"]
    half = client.post("/v1/completions", content=b'{"prompt": [1], "bad_words": ["\\ud800"]}')
    assert half.status_code == 400 and half.json()["error"]["param"] == "bad_words"
    assert complete(client, [1], bad_words=["the"], stream=True).status_code == 200


def test_tokens_there_and_back(client):
    found = client.post("/tokenize", json={"prompt": "naïve 你好", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) and found["max_model_len"] == CONTEXT
    assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "naïve 你好"}


def test_small_endpoints(client):
    assert client.get("/ready").json() == {"ready": True}
    assert client.get("/v1/models").json()["data"][0]["id"] == "stub"
    assert client.get("/v1/models/stub").json()["max_model_len"] == CONTEXT
    assert client.get("/v1/models/other").status_code == 404
    assert client.get("/nothing").json()["error"]["type"] == "invalid_request_error"
    wrong = client.get("/v1/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"]
    answer = client.get("/version", headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == "mine" and answer.json()["version"]


def test_events_of_the_cache_are_there_where_asked_for(client):
    """They have the tokens of everybody's prompts."""
    answer = client.get("/v1/kv_cache_events")
    assert answer.status_code == 404 and "--enable-kv-cache-events" in answer.json()["error"]["message"]


def test_metrics_have_the_names_that_dashboards_read(client):
    complete(client, [1])
    text = client.get("/metrics").text
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
        "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
        "external_prefix_cache_queries_total", "external_prefix_cache_hits_total",
        'request_success_total{model_name="stub",finished_reason="length"}', "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_bucket", "request_time_per_output_token_seconds_sum",
        "e2e_request_latency_seconds_count", "request_prompt_tokens_count", "request_generation_tokens_count",
    ):  # fmt: skip
        assert f"vllm:{name}" in text, name
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    labels = '{model_name="stub"}'
    ended = float(values[f"vllm:request_queue_time_seconds_count{labels}"])
    for name in ("prefill", "decode", "inference"):
        assert float(values[f"vllm:request_{name}_time_seconds_count{labels}"]) == ended >= 1
    assert float(values[f"vllm:request_queue_time_seconds_sum{labels}"]) == QUEUED * ended


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request(server, client, stream):
    """The one that waits for a whole answer as well as the one that reads it in pieces."""
    with sent(server.url, {"prompt": [HANG], "stream": stream}):
        poll(lambda: running(client) == 1)
    poll(lambda: running(client) == 0)
    assert 'finished_reason="abort"' in client.get("/metrics").text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


FIELDS = """model prompt messages max_tokens max_completion_tokens temperature top_p top_k min_p n seed stop stream
    stream_options logprobs top_logprobs echo best_of suffix logit_bias presence_penalty frequency_penalty
    repetition_penalty stop_token_ids min_tokens ignore_eos tools tool_choice response_format chat_template_kwargs
    prompt_logprobs tokens add_special_tokens user input instructions max_output_tokens text
    system stop_sequences thinking output_config continue_final_message add_generation_prompt allowed_token_ids
    bad_words truncate_prompt_tokens truncation_side priority cache_salt
    token_ids sampling_params include request_id features""".split()  # noqa: SIM905


BODIES = st.binary(max_size=20) | st.builds(
    lambda base, more: json.dumps(base | more).encode(),
    st.sampled_from([{}, {"prompt": "hi"}, {"prompt": [1, 2], "stream": True}, {"messages": [{"role": "user"}]}]),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
)


PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/inference/v1/generate",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
]


@given(body=BODIES, path=st.sampled_from(PATHS))
def test_no_body_is_our_fault(client, body, path):
    answer = client.post(path, content=body)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        ours = {"message", "type"} if "messages" in path else {"message", "type", "param", "code"}
        assert set(answer.json()["error"]) == ours


def test_bodies_that_are_hard_to_read(client):
    for body in (b"[" * 100_000, b'{"prompt": ' + b"9" * 10_000 + b"}", b'{"seed": NaN}', b"\xff", b"", b"[]"):
        answer = client.post("/v1/completions", content=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"], body[:20]
    halves = client.post("/v1/completions", content=b'{"prompt": "\\ud800", "model": "stub"}')
    assert halves.status_code == 400 and halves.json()["error"]["param"] == "prompt"
    named = client.post("/v1/completions", content=b'{"prompt": "a", "user": "\\ud800", "stop": ["\\udfff"]}')
    assert named.status_code == 400 and named.json()["error"]["param"] == "stop"
