"""graft bench on a GPU: all peers in one process, the roofline, the table of kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from graft.bench.limits.roofline import measure_roofline


def bench(*args: str) -> dict:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "graft", "bench", *args, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_all_peers_have_rows_for_two_batch_sizes():
    document = bench("tiny-llama", "--peers", "--batch", "1,4", "--prompt", "16", "--new", "64", "--dtype", "float32")
    engines = ["graft", "hugging face eager", "hugging face compile", "hugging face autotune"]
    assert [row["engine"] for row in document["rows"]] == 2 * engines
    assert [row["failed"] for row in document["rows"]] == [""] * 8
    assert all(row["decode_tokens_per_s"] > 0 and row["roofline_percent"] > 0 for row in document["rows"])
    assert all(row["build_seconds"] > 0 for row in document["rows"])
    assert all(row["same_tokens"] == 1.0 for row in document["rows"]), "greedy in float32"
    assert torch.cuda.get_device_name() == document["setup"]["device_name"]
    assert {"torch", "triton", "transformers", "date", "command"} <= document["setup"].keys()


def test_the_roofline_is_that_of_a_gpu():
    """Timed by the device; no GPU that runs bfloat16 reads less than 100 GB/s."""
    found = measure_roofline(torch.device("cuda"), torch.bfloat16)
    assert found.read_gb_per_s > 100 and found.matrix_tflops > 1
    assert "a Triton kernel over" in found.read_how


def test_kernels_of_a_step_have_times_and_the_step_has_gaps():
    (step,) = bench("tiny-llama", "--kernels", "--batch", "2", "--prompt", "16", "--new", "32")["steps"]
    assert step["on_gpu"] and step["rows"] and step["calls"] >= 1
    assert step["wall_us"] > 0 and 0 < step["busy_us"] <= step["sum_us"] * 1.0001
    assert any(row["grid"] for row in step["rows"]), "kernels come with their grids"
