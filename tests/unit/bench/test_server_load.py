"""graft bench --serve: loads against a server, what is told of them, and what goes wrong."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fake_server import fake_server
from graft.base.errors import ServerFailed, UsageError
from graft.bench.loads.spread import HEALTHY, Load
from graft.bench.server.http_client import HttpTarget
from graft.bench.server.load import measure_server, row_of_server
from graft.bench.server.request import RequestOutcome, ServerPlan, first_model, prompts, words_for
from graft.cli.app import app
from graft.cli.measure.bench_server import without_key
from serve_cases import serving


def quiet(*_):
    pass


def run(server, load, clients=2, endpoint="completions", **more):
    plan = ServerPlan("fake", endpoint, load, clients, **more)
    return asyncio.run(measure_server(HttpTarget.of(server.url), plan, 3, quiet))


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_every_request_is_sent_once_and_counted(endpoint):
    with fake_server("well") as server:
        row = run(server, Load(3, 4, 10), endpoint=endpoint)
        assert len(server.seen) == 10 and server.connections == 2  # a client keeps its connection
        path, body = server.seen[0]
    assert path == ("/v1/chat/completions" if endpoint == "chat" else "/v1/completions")
    assert body["max_tokens"] == 4 and body["stream"] and body["ignore_eos"]
    assert (row.answered, row.errors, row.output_tokens, row.prompt_tokens) == (10, {}, 4, 11)
    assert row.output_tokens_per_s == pytest.approx(40 / row.seconds)
    assert row.first_token and row.between_tokens and row.per_output_token and row.whole


def test_arrivals_do_not_wait_for_answers():
    with fake_server("well") as server:
        row = run(server, Load(3, 2, 8, rate=1000.0), clients=None)
    assert row.answered == 8 and row.name == "1000/s" and row.clients is None


@given(
    requests=st.integers(2, 200),
    rate=st.floats(0.01, 1000.0),
    took=st.floats(0.001, 1000.0),
    kept=st.floats(0.05, 0.9),
)
def test_a_server_that_keeps_the_rate_is_not_told_to_lower_it(requests, rate, took, kept):
    """However long an answer takes; one that answers at a lower rate is."""
    load = Load(3, 2, requests, rate)
    arrivals = load.arrivals()
    assert arrivals[0] == 0 and arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx((requests - 1) / rate)
    for share, behind in ((1.0, False), (kept * HEALTHY, True)):
        made = [RequestOutcome(due, [due + took], due / share + took, new=2) for due in arrivals]
        row = row_of_server(ServerPlan("m", "chat", load), made, made[-1].end)
        assert bool(row.behind) is behind
    alone = row_of_server(ServerPlan("m", "chat", Load(3, 2, 1, rate)), made[:1], made[0].end)
    assert Load(3, 2, 1, rate).arrivals() == [0.0] and not alone.behind


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("429", "HTTP 429: told to be 429"),
        ("503", "HTTP 503"),
        ("nonsense", "no HTTP answer"),
        ("error event", "it broke"),
        ("bad event", "no JSON"),
        ("bare event", "no JSON object: 7"),
        ("unfinished", "without [DONE]"),
        ("cut", "cut off"),
    ],
)
def test_what_goes_wrong_is_counted_by_its_words_and_the_rest_goes_on(kind, said):
    with fake_server("well", kind, "well") as server:
        row = run(server, Load(3, 2, 5), clients=1)
    assert row.answered == 4 and list(row.errors.values()) == [1] and said in next(iter(row.errors))
    assert row.output_tokens_per_s == pytest.approx(8 / row.seconds)  # of whole answers alone


@pytest.mark.parametrize(("clients", "resent"), [(1, 1), (5, 0)], ids=["kept", "new"])
def test_a_request_is_sent_again_where_a_kept_connection_was_closed_and_never_on_a_new_one(clients, resent):
    with fake_server("well", "silent", "well") as server:
        row = run(server, Load(3, 2, 5), clients=clients)
        assert (row.resent, len(server.seen)) == (resent, 5 + resent)
    assert row.answered == 4 + resent and sum(row.errors.values()) == 1 - resent


@pytest.mark.parametrize("kind", ["closing", "closing silently", "until closed"])
def test_connections_that_the_server_closes_are_opened_anew(kind):
    with fake_server(kind) as server:
        row = run(server, Load(3, 2, 4), clients=1)
        assert (row.answered, row.errors) == (4, {}) and server.connections == 4


def test_an_error_that_is_null_is_none():
    with fake_server("no error") as server:
        assert run(server, Load(3, 2, 3)).answered == 3


def test_the_host_of_an_ipv6_address_is_in_brackets():
    assert HttpTarget.of("http://[::1]:8000/v1").name == "[::1]:8000" and HttpTarget.of("http://h").name == "h:80"
    assert HttpTarget.of("http://[::1]:8000/v1").host == "::1"  # as sockets take it


def test_a_server_that_counts_no_tokens():
    with fake_server("uncounted") as server:
        row = run(server, Load(3, 5, 2))
        plan = ServerPlan("fake", "chat", Load(40, 2, 1))
        assert asyncio.run(words_for(HttpTarget.of(server.url), plan)) == 40
    assert row.prompt_tokens is None and row.output_tokens == 5  # events with text


def test_words_are_found_for_the_tokens_asked_for():
    with fake_server("well") as server:  # two tokens a word, and five
        target = HttpTarget.of(f"{server.url}/v1/")
        for isl, words in ((105, 50), (25, 10), (2, 1)):
            plan = ServerPlan("fake", "completions", Load(isl, 2, 1))
            assert asyncio.run(words_for(target, plan)) == words
        assert asyncio.run(first_model(target)) == "fake"
    texts = prompts(30, "seed")
    assert len({next(texts) for _ in range(100)}) == 100 and next(prompts(3, "a")) == next(prompts(3, "a"))


def test_times_of_a_request():
    plan = ServerPlan("m", "chat", Load(1, 1, 2), 1)
    made = [
        RequestOutcome(1.0, [1.5, 1.6, 1.9], 2.0, prompt=7, new=5),  # five tokens in three pieces
        RequestOutcome(0.0, [9.0], 9.0, error="cut"),
    ]
    row = row_of_server(plan, made, 4.0)
    assert row.first_token.p50 == pytest.approx(500) and row.between_tokens.p99 == pytest.approx(300, rel=0.05)
    assert row.per_output_token.p50 == pytest.approx(100) and row.whole.p50 == pytest.approx(1000)
    assert (row.output_tokens_per_s, row.requests_per_s, row.errors) == (1.25, 0.25, {"cut": 1})


def test_a_request_that_takes_too_long():
    async def hangs():
        server = await asyncio.start_server(lambda *_: asyncio.sleep(3600), "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        plan = ServerPlan("m", "completions", Load(1, 1, 2), 2, timeout=0.05)
        row = await measure_server(HttpTarget.of(f"http://{host}:{port}"), plan, 1, quiet)
        server.close()
        return row

    assert asyncio.run(hangs()).errors == {"no answer in time": 2}


@pytest.mark.parametrize("url", ["ftp://x", "localhost:8000", "http://", "http://h:99999/v1"])
def test_urls_that_are_none(url):
    with pytest.raises(UsageError, match="--serve"):
        HttpTarget.of(url)


def test_the_command_against_our_server(tmp_path):
    with serving("chat") as server:
        picture = tmp_path / "load.svg"
        told = bench("--serve", server.url, "--clients", "1,2", "--requests", 4, "--prompt", 30, "--new", 3, "--json",
                     "--plot", picture, "--endpoint", "chat")  # fmt: skip
        assert told.exit_code == 0, told.output
        found = json.loads(told.stdout)
        assert found["setup"]["model"] == "chat" and [row["clients"] for row in found["rows"]] == [1, 2]
        assert all(row["answered"] == 4 and row["output_tokens"] == 3 for row in found["rows"])
        assert all(abs(row["prompt_tokens"] - 30) <= 10 for row in found["rows"])
        assert b"<svg" in picture.read_bytes()
        table = bench("--serve", f"{server.url}/v1", "--rate", 100, "--requests", 3, "--prompt", 9, "--new", 2)
        assert table.exit_code == 0 and "TTFT" in table.output and "100/s" in table.output
        long = bench("--serve", server.url, "--clients", 1, "--requests", 2, "--prompt", 9, "--new", 5000)
        assert long.exit_code == 1 and "failed: HTTP 400" in long.output


def test_a_server_that_refuses_all_is_told_at_once():
    with fake_server("401") as server:
        told = bench("--serve", server.url, "--clients", 1)
        assert told.exit_code == 1 and "a first request failed: HTTP 401" in told.output and len(server.seen) == 1
    with pytest.raises(ServerFailed, match="cannot be measured"):
        asyncio.run(first_model(HttpTarget.of("http://127.0.0.1:9/v1")))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--clients", "2"], "--clients needs --serve"),
        (["--serve", "http://x", "--batch", "1"], "--batch says nothing about a server"),
        (["--serve", "http://x", "--dtype", "float32"], "--dtype says nothing"),
        (["--serve", "http://x", "--clients", "1", "--rate", "2"], "give one of them"),
        (["--serve", "http://x", "--clients", "none"], "--clients takes numbers"),
        (["--serve", "http://x", "--clients", "0"], "at least 1"),
        (["--serve", "http://x", "--requests", "0"], "--requests must be at least 1"),
        (["--serve", "http://x", "--endpoint", "chats"], "did you mean 'chat'"),
        (["--serve", "http://x", "--extra-body", "[]"], "a JSON object"),
        (["--serve", "http://x", "--extra-body", "{"], "not valid JSON"),
    ],
)
def test_options_that_cannot_be_meant(arguments, said):
    told = bench(*arguments)
    assert told.exit_code == 2 and said in told.output


def test_a_key_is_sent_and_not_kept():
    target = HttpTarget.of("https://host/openai/v1", "secret")
    assert target.headers == {"Authorization": "Bearer secret"} and target.secure and target.base == "/openai/v1"
    assert without_key(["bench", "--api-key", "secret", "--api-key=secret"]) == [
        "bench",
        "--api-key",
        "***",
        "--api-key=***",
    ]
    with pytest.raises(UsageError, match="ASCII"):
        HttpTarget.of("http://h", "two\nlines")
