"""The examples run as a user runs them, and print what they are there to show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOWN = {
    "aliased_io_user_inputs": [
        "k_cache    kv_cache_update",
        "a cache of 4096 positions runs on the same graph: 1 captured",
    ],
    "aliased_io_buffers": ["steps      user", "saved, loaded and gone on with: steps = 6", "after reset: steps = 0"],
    "aliased_io_kv_attention": ["v_cache    kv_cache_update", "sequence 1: prefill of 7 and 20 steps as in eager"],
}


@pytest.mark.parametrize("name", SHOWN)
def test_examples_of_state_r45(name):
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    for line in SHOWN[name]:
        assert line in done.stdout
    assert "bytes of caches copied in a step: 0 of" in done.stdout


def test_an_unknown_backend_is_named_r45():
    command = [sys.executable, str(ROOT / "examples" / "aliased_io_buffers.py"), "--backend", "nothing"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}
    )
    assert done.returncode == 2 and "invalid choice: 'nothing'" in done.stderr
