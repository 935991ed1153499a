"""How a server ends, refuses and goes on: drains, engines that die, full queues, slow clients."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess

import pytest

from graft.base.errors import UsageError
from graft.serve.run import listening
from marks import short
from serve_cases import PATIENCE, chunks, complete, http_client, poll, running, sent, serving, stream_of
from stub_engine import DIE, HANG, PAUSE, SLOW


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


NOT_SERVED = [
    ("refused", 2, "no such model"),
    ("first-dies", 1, "the engine process ended with exit status 9 over its first request"),
    ("other-tokens", 1, "other tokens for 'hi'"),
    ("first-fails", 1, "its first request failed: no kernel"),
]


@pytest.mark.parametrize(("model", "code", "why"), short(NOT_SERVED, *NOT_SERVED[:2]))
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
