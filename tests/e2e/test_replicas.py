"""Two replicas of a real engine on Ray Serve: answers, prefixes, killed processes, an upgrade under load."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

import graft
from document_schemas import follows
from serve_cases import PATIENCE, Served, http_client, poll, source, tiny_checkpoint

pytest.importorskip("ray", reason="several replicas need graft[ray], which is not installed")
pytestmark = pytest.mark.exhaustive

SIZE = {"dtype": "float32", "backend": "eager", "max-num-seqs": 8, "kv-cache-memory": "4MiB"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("replicas") / "tiny-served")


@pytest.fixture(scope="module")
def llm(folder):
    return graft.LLM(folder, dtype="float32", device="cpu", backend="eager", max_num_seqs=8, kv_cache_memory="4MiB")


@pytest.fixture(scope="module")
def sessions():
    """Of this cluster alone; Ray's sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="graft-") as found:
        yield found


@pytest.fixture(scope="module")
def server(folder, llm, sessions):
    given = [part for name, value in SIZE.items() for part in (f"--{name}", value)]
    environment = {"OMP_NUM_THREADS": "1", "RAY_TMPDIR": sessions, "RAY_USAGE_STATS_ENABLED": "0"}
    found = Served(folder, "--replicas", 2, *given, stub=False, **environment)
    try:
        found.patience = 4 * PATIENCE  # Ray starts some ten processes
        poll(lambda: found.url)
        yield found
        found.signal()
        assert found.ended() == 0
    finally:
        if found.process.poll() is None:
            found.signal()
            found.process.wait(PATIENCE)


@pytest.fixture(scope="module")
def plain(server):
    with http_client(server.url) as found:
        yield found


def engines(sessions):
    """The processes of this cluster's replicas, by number."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            named = entry.name.isdigit() and b"ServeReplica:graft:EngineReplica" in (entry / "cmdline").read_bytes()
            if named and f"RAY_TMPDIR={sessions}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended meanwhile
    return sorted(found)


def worker_of(replica):
    children = [
        Path(f"/proc/{replica}/task/{one}/children").read_text() for one in os.listdir(f"/proc/{replica}/task")
    ]
    return next(int(pid) for text in children for pid in text.split() if b"graft.serve.worker" in cmdline(pid))


def cmdline(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def body(number, tokens=24, **more):
    return {"prompt": [20 + number, *range(30, 60)], "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
            "return_token_ids": True, **more}  # fmt: skip


def expected(llm, number, tokens=24):
    params = graft.SamplingParams(max_tokens=tokens, ignore_eos=True)
    return llm.generate([body(number)["prompt"]], params)[0].token_ids


def streamed(plain, asked):
    """Tokens, whether it ended well, and its error event."""
    ids, done, error = [], False, None
    with plain.stream("POST", "/v1/completions", json={**asked, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                error = event.get("error", error)
                ids += [token for one in event.get("choices", ()) for token in one["token_ids"]]
    return ids, done, error


def metric(plain, name):
    """By replica."""
    lines = re.findall(rf'^{re.escape(name)}{{replica="(\w+)".*}} (\S+)$', plain.get("/metrics").text, re.M)
    return {replica: float(value) for replica, value in lines}


def counted(plain, name):
    return int(re.search(rf"^{name} (\d+)", plain.get("/metrics").text, re.M)[1])


def test_answers_are_those_of_one_engine(llm, plain):
    with ThreadPoolExecutor(8) as pool:
        wholes = list(pool.map(lambda n: plain.post("/v1/completions", json=body(n)).json(), range(8)))
        streams = list(pool.map(lambda n: streamed(plain, body(n)), range(8)))
    for number, (whole, stream) in enumerate(zip(wholes, streams, strict=True)):
        right = expected(llm, number)
        assert whole["choices"][0]["token_ids"] == right
        assert stream == (right, True, None)


def test_openai_reads_its_answers_and_errors(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as client:
        chat = {"model": "tiny-served", "messages": [{"role": "user", "content": "the quick"}], "max_tokens": 4}
        answer = client.chat.completions.create(**chat)
        type(answer).model_validate(answer.model_dump(), strict=True)
        assert [one.id for one in client.models.list()] == ["tiny-served"]
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**{**chat, "model": "another"})
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(**chat, temperature=-1)


def test_requests_that_begin_alike_go_where_the_blocks_are(plain):
    """One after another, in two rounds: chance would send half of the second elsewhere."""
    systems = [[100 + number, *range(200, 295)] for number in range(10)]

    def cached(system, question):
        asked = {"prompt": [*system, question], "max_tokens": 2, "temperature": 0}
        return plain.post("/v1/completions", json=asked).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(one, 5) for one in systems] == [0] * 10
    assert [cached(one, 6) for one in systems] == [96] * 10
    poll(lambda: len([one for one in metric(plain, "vllm:prefix_cache_hits_total").values() if one]) == 2)


def test_token_ids_and_cut_prompts_find_their_blocks(llm, plain):
    """The router is told what a prompt is to the cache: of one that is cut, what stays."""
    params = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    prompts = [[150 + number, *range(60, 155)] for number in range(6)]
    for ids in prompts:
        asked = {"token_ids": ids, "sampling_params": params}
        first, again = (plain.post("/inference/v1/generate", json=asked).json() for _ in range(2))
        right = llm.generate([ids], graft.SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids
        assert first["choices"][0]["token_ids"] == again["choices"][0]["token_ids"] == right
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 80
        longer = {"prompt": [*range(40), *ids], **params, "truncate_prompt_tokens": len(ids)}
        cut = plain.post("/v1/completions", json={**longer, "return_token_ids": True}).json()
        assert cut["choices"][0]["token_ids"] == right
        assert cut["usage"]["prompt_tokens_details"]["cached_tokens"] == 80


def test_who_leaves_ends_the_work(plain):
    with plain.stream(
        "POST", "/v1/completions", json=body(0, 900, stream=True, n=8, temperature=1, seed=1)
    ) as answer:
        assert answer.status_code == 200
        next(answer.iter_lines())
    poll(lambda: re.search(r'finished_reason="abort"} [1-9]', plain.get("/metrics").text))
    poll(lambda: list(metric(plain, "vllm:num_requests_running").values()) == [0, 0])


def load_while(plain, llm, act):
    """Whole answers and streams, before, while and after `act` runs in this thread."""
    over, wholes, streams = threading.Event(), [], []

    def ask(number):
        while not over.is_set():
            answer = plain.post("/v1/completions", json=body(number))
            wholes.append((number, answer.status_code, answer.json()))
            streams.append((number, *streamed(plain, body(number, 200))))

    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(ask, number) for number in range(6)]
        try:
            poll(lambda: len(streams) >= 6)
            act()
            seen = len(streams)
            poll(lambda: len(streams) >= seen + 6)
        finally:
            over.set()
        for future in futures:
            future.result()
    for number, status, answer in wholes:
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == expected(llm, number)
    return streams


def check_streams(llm, streams):
    """Right tokens in all of them; those that were cut say so. How many."""
    cut = 0
    for number, ids, done, error in streams:
        right = expected(llm, number, 200)
        assert ids == right[: len(ids)]
        assert done == (len(ids) == len(right)) == (error is None)
        if error is not None:
            assert "gone" in error["message"] or "killed" in error["message"]
            cut += 1
    return cut


def test_a_replica_is_killed_under_load(llm, plain, sessions):
    before = engines(sessions)

    def kill():
        os.kill(before[0], signal.SIGKILL)
        poll(lambda: len(set(engines(sessions)) - {before[0]}) == 2)

    assert len(before) == 2
    cut = check_streams(llm, load_while(plain, llm, kill))
    lost, retries = (counted(plain, f"graft:gateway_{name}_total") for name in ("streams_lost", "retries"))
    assert cut == lost <= 6
    assert retries + lost <= 6, "the dead one was asked by those alone that had a request there, or on the way"


def test_an_engine_process_is_killed_under_load(llm, plain, sessions):
    replicas = engines(sessions)
    check_streams(llm, load_while(plain, llm, lambda: os.kill(worker_of(replicas[0]), signal.SIGKILL)))
    poll(lambda: len(set(engines(sessions)) - {replicas[0]}) == 2)


def test_an_upgrade_loses_no_request(llm, plain, server, folder, sessions, tmp_path):
    before, port = engines(sessions), int(server.url.rsplit(":", 1)[1])
    file = tmp_path / "app.yaml"
    file.write_text(
        json.dumps({"serve": {"model": str(folder), **SIZE, "max-num-seqs": 6, "port": port}, "replicas": 2})
    )
    paths = os.pathsep.join([str(source()), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "RAY_TMPDIR": sessions}

    def upgrade():
        command = [sys.executable, "-m", "graft", "deploy", str(file), "--json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE * 3)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert follows(told) == "deploy"
        assert told["changed"] and told["status"] == "RUNNING" and told["replicas"]["EngineReplica"]["RUNNING"] == 2

    assert check_streams(llm, load_while(plain, llm, upgrade)) == 0
    poll(lambda: not set(engines(sessions)) & set(before))
