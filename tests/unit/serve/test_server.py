"""The HTTP process as a whole, over an engine process without a model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.base.errors import UsageError
from graft.serve.run import listening
from serve_cases import PATIENCE, http_client, poll, sent, serving
from stub_engine import CONTEXT, DIE, HANG, PAUSE, QUEUED, SLOW


@pytest.fixture(scope="module")
def server():
    with serving("stub") as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with http_client(server.url) as found:
        yield found


def complete(client, prompt, **more):
    return client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, **more})


def chunks(lines):
    """The events of a stream, without the end mark, and whether that was there."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"], data[-1:] == ["[DONE]"]


def running(client):
    return client.get("/health").json()["running"]


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
    system stop_sequences thinking output_config continue_final_message add_generation_prompt""".split()  # noqa: SIM905
BODIES = st.binary(max_size=20) | st.builds(
    lambda base, more: json.dumps(base | more).encode(),
    st.sampled_from([{}, {"prompt": "hi"}, {"prompt": [1, 2], "stream": True}, {"messages": [{"role": "user"}]}]),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
)


PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
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


def test_limits_and_keys(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfirst\n")
    limits = ("--max-num-seqs", 2, "--max-queued-requests", 1, "--max-body-size", 300)
    with serving("stub", *limits, "--api-key-file", keys, GRAFT_API_KEY="other") as server:
        plain = http_client(server.url)
        refused = complete(plain, "hi")
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert plain.get("/health").status_code == 200
        assert complete(plain, "hi", headers=None).status_code == 401
        assert plain.get("/v1/models", headers={"Authorization": "Bearer other"}).status_code == 200
        client = http_client(server.url, headers={"Authorization": "Bearer first"})
        assert complete(client, "x" * 300).status_code == 413
        assert client.post("/v1/completions", content=iter([b"x" * 200] * 3)).status_code == 413
        too_long = complete(client, "x y " * 40)
        assert too_long.status_code == 400 and too_long.json()["error"]["code"] == "context_length_exceeded"
        assert complete(client, [1], n=4).status_code == 429
        hanging = [stream_of(client, [PAUSE]) for _ in range(3)]
        for one in hanging:
            assert one.__enter__().status_code == 200
        full = complete(client, [1])
        assert full.status_code == 429 and full.headers["retry-after"]
        assert full.json()["error"]["code"] == "queue_full"
        hanging[0].__exit__(None, None, None)
        assert poll(lambda: complete(client, [1]).status_code == 200)
        keys.write_text("second\n")
        assert complete(client, [1]).status_code == 401
        for one in hanging[1:]:
            one.__exit__(None, None, None)
        plain.close()
        client.close()


def stream_of(client, prompt, **more):
    body = {"prompt": prompt, "stream": True, "max_tokens": 30, **more}
    return client.stream("POST", "/v1/completions", json=body)


def test_a_drain_lets_answers_end():
    with serving("stub") as server, http_client(server.url) as client:
        with stream_of(client, [SLOW, 9]) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            server.signal()
            poll(lambda: client.get("/ready").status_code == 503)
            assert client.get("/health").json()["status"] == "draining"
            assert complete(client, [1]).status_code == 503
            found, done = chunks([first, *lines])
            assert done and sum(len(chunk["choices"]) for chunk in found) == 30
        assert server.ended() == 0


def test_a_drain_ends_in_time_and_tells_the_rest():
    with serving("stub", "--drain-timeout", 0.1) as server, http_client(server.url) as client:
        with stream_of(client, [PAUSE]) as answer:
            server.signal()
            found, done = chunks(answer.iter_lines())
            assert not done and "shutting down" in found[-1]["error"]["message"]
        assert server.ended() == 0


def test_a_second_signal_ends_at_once():
    with serving("stub") as server, http_client(server.url) as client:
        with stream_of(client, [PAUSE]):
            engine = server.engine
            server.signal()
            poll(lambda: client.get("/ready").status_code == 503)
            server.signal()
            assert server.ended() == 128 + signal.SIGTERM
        poll(lambda: not os.path.exists(f"/proc/{engine}"))


def test_an_engine_that_dies_is_told_to_everyone():
    with serving("stub") as server, http_client(server.url) as client:
        with stream_of(client, [PAUSE]) as answer:
            died = complete(client, [DIE])
            assert died.status_code == 503 and "exit status 9" in died.json()["error"]["message"]
            found, done = chunks(answer.iter_lines())
            assert not done and found[-1]["error"]["type"] == "service_unavailable"
        health = client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "dead"
        assert complete(client, [1]).status_code == 503 and client.get("/ready").status_code == 503
        server.signal()
        assert server.ended() == 0


def test_readers_of_the_cache_are_told_when_it_ends():
    """They hold up no drain; another engine's cache is told from its beginning."""
    with serving("stub", "--restart", "--enable-kv-cache-events") as server, http_client(server.url) as client:
        with client.stream("GET", "/v1/kv_cache_events") as answer:
            lines = answer.iter_lines()
            first = [next(lines) for _ in range(3)]
            assert first[:2] == ["event: created", "id: 0"] and json.loads(first[2][6:])["levels"] == [100]
            os.kill(server.engine, signal.SIGKILL)
            assert "was killed by SIGKILL" in "".join(lines)
        poll(lambda: client.get("/ready").status_code == 200)
        with client.stream("GET", "/v1/kv_cache_events") as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: created"
            server.signal()
            assert "shutting down" in "".join(lines)
        assert server.ended() == 0


def test_an_engine_that_dies_is_started_again_where_asked():
    with serving("stub", "--restart") as server, http_client(server.url) as client:
        before = server.engine
        os.kill(before, signal.SIGKILL)
        poll(lambda: 'graft:engine_restarts_total{model_name="stub"} 1' in client.get("/metrics").text)
        poll(lambda: client.get("/ready").status_code == 200)
        assert complete(client, [1]).status_code == 200 and server.engine != before


@pytest.mark.some(1)
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_waits_too_long_is_refused(stream):
    """One that has begun is not, however long it takes; a stream has not begun before its first token."""
    with serving("stub", "--max-queue-time", 0.05) as server, http_client(server.url) as client:
        refused = complete(client, [HANG], stream=stream)
        assert refused.status_code == 429 and refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "queue_timeout"
        assert complete(client, [SLOW], stream=stream, max_tokens=10).status_code == 200
        poll(lambda: running(client) == 0)


@pytest.mark.parametrize(
    ("model", "code", "why"),
    [
        ("refused", 2, "no such model"),
        ("other-tokens", 1, "other tokens for 'hi'"),
        ("first-fails", 1, "its first request failed: no kernel"),
        ("first-dies", 1, "the engine process ended with exit status 9 over its first request"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--restart",)])
def test_a_model_that_cannot_be_served_ends_the_program(model, code, why, more):
    """Where it was never ready, a restart would go on for ever."""
    with serving(model, *more, errors=subprocess.PIPE) as server:
        assert server.ended() == code
        assert why in server.process.stderr.read()
        server.process.stderr.close()


def test_a_name_that_is_no_model_starts_no_engine():
    with serving("nonsense", stub=False, errors=subprocess.PIPE) as server:
        assert server.ended() == 2
        assert "unknown model 'nonsense'" in server.process.stderr.read()
        server.process.stderr.close()


def test_a_client_that_sends_or_reads_nothing_is_cut_off():
    """What the sockets hold is full after some megabytes."""
    wide = {"prompt": [[9]] * 80, "n": 3, "stream": True, "max_tokens": 60, "logprobs": 2}
    options = ("--slow-client-timeout", 0.2, "--max-num-seqs", 1000)
    with serving("stub", *options) as server, http_client(server.url) as client:

        def never_ends():
            yield b"{"
            poll(lambda: 'status="408"' in client.get("/metrics").text)

        with http_client(server.url) as other:
            assert other.post("/v1/completions", content=never_ends()).status_code == 408
        with sent(server.url, wide):
            poll(lambda: 'graft:slow_clients_total{model_name="stub"} 1' in client.get("/metrics").text)
            assert running(client) == 0
        assert complete(client, [1]).status_code == 200


def test_a_connection_without_a_request_is_closed():
    """However slowly a head comes; and one that has had an answer, too. A request that takes long is none."""
    with serving("stub", "--slow-client-timeout", 0.3) as server, http_client(server.url) as client:
        host, port = server.url.removeprefix("http://").split(":")
        with (
            socket.create_connection((host, int(port))) as silent,
            socket.create_connection((host, int(port))) as dripping,
            socket.create_connection((host, int(port))) as second,
        ):
            second.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            seen = b""
            while b"version" not in seen:
                seen += second.recv(65536)
            second.sendall(b"GET /version HT")
            for letter in b"GET /version HTTP/1.1\r\nX: ":
                dripping.sendall(bytes([letter]))
            for one in (silent, dripping, second):
                one.settimeout(PATIENCE)
                assert one.recv(65536) == b""
        assert 'graft:slow_clients_total{model_name="stub"} 3' in client.get("/metrics").text
        assert complete(client, [SLOW], max_tokens=40).json()["usage"]["completion_tokens"] == 40


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match="cannot listen"):
        listening(*taken.getsockname())


def test_lines_for_programs():
    with serving("stub", "--json") as server:
        lines = (json.loads(line) for line in server.process.stdout)
        url = next(line["url"] for line in lines if line["event"] == "ready")
        with http_client(url) as client:
            complete(client, "secret words")
        line = next(line for line in lines if line["event"] == "request")
        assert line["status"] == 200 and line["tokens"] == 4 and line["finish"] == "length"
        assert "secret" not in json.dumps(line)
