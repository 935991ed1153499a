"""Replicas by open requests, from one to two and back, behind two gateways, on Ray Serve."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from processes import Forked
from serve_cases import PATIENCE, http_client, poll, source, tiny_checkpoint

pytest.importorskip("ray", reason="several replicas need graft[ray], which is not installed")
pytestmark = pytest.mark.exhaustive

SERVE = """
import sys
import typer.main
from graft.cli.app import app
from graft.cli.generate.deploy import read_app
from graft.deploy.run import serve_replicas
serve = typer.main.get_command(app).commands["serve"]
sys.exit(serve_replicas(read_app(serve, sys.argv[1])))
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scaled")
    options = {"model": str(tiny_checkpoint(folder / "tiny-served")), "dtype": "float32", "backend": "eager",
               "max-num-seqs": 2, "kv-cache-memory": "4MiB", "port": 0}  # fmt: skip
    scaling = {"min": 1, "max": 2, "open_requests": 1, "up_after": 1, "down_after": 5}
    (folder / "app.yaml").write_text(json.dumps({"serve": options, "replicas": scaling, "gateways": 2, "cpus": 0.5}))
    with tempfile.TemporaryDirectory(prefix="graft-") as sessions:
        paths = os.pathsep.join([str(source()), os.environ.get("PYTHONPATH", "")])
        more = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "RAY_TMPDIR": sessions, "RAY_USAGE_STATS_ENABLED": "0"}
        process = Forked("-c", SERVE, str(folder / "app.yaml"), stdout=subprocess.PIPE, env={**os.environ, **more})
        try:
            assert select.select([process.stdout], [], [], 4 * PATIENCE)[0], "it never got ready"
            line = process.stdout.readline()
            assert "ready at" in line and "1 to 2 replicas" in line
            yield line.split("ready at ")[1].split("/v1")[0]
        finally:
            process.send_signal(15)
            assert process.wait(PATIENCE) == 0


def wait_for(client, count):
    """Until so many replicas tell of themselves; either gateway answers. A start takes a minute on a busy machine."""
    poll(lambda: len(replicas(client)) == count, 4 * PATIENCE)


def replicas(client):
    text = client.get("/metrics").text
    return set(re.findall(r'^vllm:num_requests_running{replica="(\w+)"', text, re.M))


def test_replicas_come_with_the_load_and_go_after_it(url):
    over, failed = threading.Event(), []

    def ask(number):
        with http_client(url) as client:
            while not over.is_set():
                asked = {"prompt": [20 + number, *range(30, 60)], "max_tokens": 100, "ignore_eos": True}
                answer = client.post("/v1/completions", json=asked)
                if answer.status_code != 200:
                    failed.append(answer.text)

    with http_client(url) as client:
        wait_for(client, 1)
        with ThreadPoolExecutor(6) as pool:
            futures = [pool.submit(ask, number) for number in range(6)]
            try:
                wait_for(client, 2)
            finally:
                over.set()
            for future in futures:
                future.result()
        assert not failed, failed[0]
        wait_for(client, 1)
        assert client.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 2}).status_code == 200
