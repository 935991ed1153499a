"""Whatever clients do, the others have the right tokens, and in the end nothing is left of anybody.

GRAFT_SOAK_REQUESTS: how many requests; 100,000 in `make test-all`, some hundreds in `make test`.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles

import pytest

import graft
from marks import FULL
from serve_cases import http_client, poll, serving, tiny_checkpoint
from serve_soak import Soak

REQUESTS = int(os.environ.get("GRAFT_SOAK_REQUESTS", 100_000 if FULL else 250))
SIZE = {"max_num_seqs": 16, "kv_cache_memory": "320KiB"}
IDLE = {"status": "ready", "seconds_since_step": 0, "running": 0, "waiting": 0}
AT_ONCE, PARTS = 24, 10
GROWTH = 16  # MiB: what an allocator may hold back; 250 requests whose blocks or tickets stay take more


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("soaked") / "tiny-served")


@pytest.fixture(scope="module")
def expected(folder):
    """Bodies and the tokens that LLM.generate gives for them."""
    rng = random.Random(0)
    params = [
        {"max_tokens": rng.randint(1, 20), "temperature": rng.choice([0, 0.8]), "seed": number, "ignore_eos": True}
        for number in range(16)
    ]
    prompts = [[rng.randrange(3, 300) for _ in range(rng.randint(1, 100))] for _ in params]
    llm = graft.LLM(folder, dtype="float32", device="cpu", **SIZE)
    outputs = llm.generate(prompts, [graft.SamplingParams(**one) for one in params])
    bodies = [{"prompt": p, "return_token_ids": True, **more} for p, more in zip(prompts, params, strict=True)]
    return [(body, output.token_ids) for body, output in zip(bodies, outputs, strict=True)]


def resident(number):
    """MiB of a process. The HTTP process is forked from one that has imported torch, whose 150 MiB and more are in
    it; a server that is started by itself has none of them."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{number}/status").read_text())[1]) / 1024


def own(number):
    """MiB that a process shares with no other: of one that was forked, what it has written since, too."""
    found = re.findall(r"^Private_\w+:\s+(\d+)", Path(f"/proc/{number}/smaps_rollup").read_text(), re.M)
    return round(sum(map(int, found)) / 1024, 1)


def value(text, name):
    return float(re.search(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.M)[1])


def soaked(server, plain, expected):
    """In parts, after each of which nothing is left; in the middle of the last the engine is killed."""
    host, port = server.url.removeprefix("http://").split(":")
    soak, sizes = Soak(host, int(port), expected, random.Random(1)), []

    def nothing_is_left():
        poll(lambda: plain.get("/health").json() | {"seconds_since_step": 0} == IDLE)
        assert value(plain.get("/metrics").text, "vllm:kv_cache_usage_perc") == 0

    for _ in range(PARTS - 1):
        asyncio.run(soak.run(REQUESTS // PARTS, AT_ONCE))
        nothing_is_left()
        assert not soak.wrong, soak.wrong[:3]
        sizes.append([round(resident(number), 1) for number in (server.process.pid, server.engine)])
        preempted = value(plain.get("/metrics").text, "vllm:num_preemptions_total")
        told = f"{sum(soak.seen.values())} requests, {preempted:g} preemptions"
        print(
            f"{told}, MiB of HTTP and engine process: {sizes[-1]}, {own(server.process.pid)} of HTTP's own",
            flush=True,
        )
    assert not [kind for kind in soak.seen if ": 50" in kind], soak.seen
    asyncio.run(soak.run(REQUESTS // PARTS, AT_ONCE, kill=lambda: os.kill(server.engine, signal.SIGKILL)))
    nothing_is_left()
    print(f"{sum(soak.seen.values())} requests: {dict(soak.seen)}; wrong: {len(soak.wrong)}")
    for kind in ("whole: 200", "streamed: 200"):
        p50, p99 = (quantiles(soak.seconds[kind], n=100)[at] for at in (49, 98))
        print(f"{kind}: {p50:.3f} s p50, {p99:.3f} s p99, {max(soak.seconds[kind]):.3f} s at most")
    assert not soak.wrong, soak.wrong[:3]
    for kind in ("whole: 200", "streamed: 200", "left a stream", "bad: 400"):
        assert soak.seen[kind], soak.seen
    early = [max(column) for column in zip(*sizes[: PARTS // 2], strict=True)]  # bodies of 5 MB come and go in it
    assert all(after < most + GROWTH for most, after in zip(early, sizes[-1], strict=True)), f"memory grows: {sizes}"
    told = plain.get("/metrics").text
    assert value(told, "graft:log_lines_lost_total") > REQUESTS / 4
    assert value(told, "graft:engine_restarts_total") == 1 and plain.get("/ready").status_code == 200
    server.signal()
    assert server.ended() == 0


@contextmanager
def full_disk():
    """Where logs go."""
    found = os.open("/dev/full", os.O_WRONLY)
    try:
        yield found
    finally:
        os.close(found)


@pytest.mark.exhaustive
def test_soak(folder, expected):
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SIZE.items()]
    kind = ("--dtype", "float32", "--restart")
    with (
        full_disk() as errors,
        serving(folder, *kind, *options, stub=False, errors=errors, OMP_NUM_THREADS="1") as server,
        http_client(server.url) as plain,
    ):
        soaked(server, plain, expected)


def test_soak_of_an_engine_without_a_model():
    """Everything round the engine: its answers count on from the last token of a prompt."""
    rng, expected = random.Random(0), []
    for _ in range(16):
        prompt, count = [rng.randrange(10, 300) for _ in range(rng.randint(1, 20))], rng.randint(1, 40)
        body = {"prompt": prompt, "max_tokens": count, "return_token_ids": True}
        expected.append((body, [(prompt[-1] + 1 + index) % 300 for index in range(count)]))
    with (
        full_disk() as errors,
        serving("stub", "--restart", errors=errors) as server,
        http_client(server.url) as plain,
    ):
        soaked(server, plain, expected)
