"""The example programs run on this machine, agree with eager (they assert it themselves) and copy no cache."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("aliased_io_*.py"))


def test_the_three_cases_of_aliased_io_have_an_example():
    assert [path.stem for path in EXAMPLES] == [f"aliased_io_{n}" for n in ("buffers", "kv_attention", "user_inputs")]


@pytest.mark.some(1)
@pytest.mark.parametrize("backend", ["eager", "cuda_graph"])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run_and_copy_no_cache(path, backend, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", [str(path), "--backend", backend, "--device", "cpu"])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert "alias map, decided at compile time:" in printed and "kv_cache_update" in printed
    assert "bytes of caches copied in a step: 0 of " in printed
    assert ("bytes staged for a replay" in printed) is (backend == "cuda_graph")


def test_the_counter_of_the_examples_sees_copies(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from shared import Copies

    cache, at, x = torch.zeros(2, 8), torch.tensor([1]), torch.ones(2, 1)
    with Copies([cache]) as copies:
        cache.index_copy_(1, at, x)
    assert copies.bytes == 0
    with Copies([cache]) as copies:
        cache.copy_(cache.index_copy(1, at, x))  # a new cache, and all of it written back
    assert copies.bytes == 2 * cache.nbytes


def test_the_life_of_the_cache_has_an_example(monkeypatch, capsys):
    path = FOLDER / "kv_cache_events.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--model", "tiny-llama"])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert "created" in printed and "the second prompt, 42 tokens, 32 of them from the cache" in printed
    assert "in_use False → True" in printed and "a reader of the events alone knows all" in printed


@pytest.mark.exhaustive
def test_streaming_speech_has_an_example(monkeypatch, capsys):
    path = FOLDER / "streaming_speech.py"
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", [str(path), "--device", "cpu"])
    runpy.run_path(str(path), run_name="__main__")  # compares every token with eager
    printed = capsys.readouterr().out
    assert "graph 0 (compile): writes 4 tensors of cross-attention, 4 others" in printed
    assert "graph 1 " in printed and "writes 0 tensors of cross-attention, 4 others" in printed


@pytest.mark.exhaustive
def test_streams_have_an_example(monkeypatch, capsys, tmp_path):
    path, trace = FOLDER / "multistream_overlap.py", tmp_path / "trace.json"
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(path), "--device", "cpu", "--trace", str(trace)])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert "attention and MLP from one norm" in printed and "shared and routed experts" in printed
    assert "stream 1 " in printed and "taken: no: the graph is on no GPU" in printed
    assert "nothing overlaps here" in printed
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0, 1}
    monkeypatch.setattr(sys, "argv", [str(path), "--device", "cpu", "--json"])
    runpy.run_path(str(path), run_name="__main__")
    assert all(result["same_bits"] and not result["taken"] for result in json.loads(capsys.readouterr().out))
