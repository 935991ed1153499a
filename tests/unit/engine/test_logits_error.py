"""How far an engine's logits are from float64: for every format, and noticed where a weight is another."""

from __future__ import annotations

import re

import pytest
import torch

from graft import LLM
from graft.bench import quality
from graft.bench.quality import logits_error, logits_note
from marks import short
from native_cases import needs_compiler

IDS = [5, 6, 7, 11, 3]


def made(**options) -> LLM:
    return LLM("tiny-llama", device="cpu", kv_cache_memory="8MiB", keep_weights=True, **options)


def error_of(llm: LLM) -> float:
    note = logits_note(llm, IDS)
    told = r"logits: (\S+) of their norm off those of the model in float64, over 5 tokens; (\S+) in decode steps"
    found = re.fullmatch(told, note)
    assert found, note
    return max(float(found[1]), float(found[2]))


def test_logits_error_is_relative():
    exact = torch.randn(4, 9, dtype=torch.float64)
    assert logits_error(exact, exact) == 0
    assert logits_error(exact * 1.5, exact) == pytest.approx(0.5)


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("backend", short(["eager", "native"], "eager"))
def test_the_error_follows_the_format(backend):
    errors = {
        "float32": error_of(made(dtype="float32", backend=backend)),
        "bfloat16": error_of(made(dtype="bfloat16", backend=backend)),
        "int8": error_of(made(dtype="float32", backend=backend, quantize="int8")),
        "int4": error_of(made(dtype="float32", backend=backend, quantize="int4")),
    }
    assert errors["float32"] < 1e-5 < errors["int8"] < errors["int4"] < 0.5
    assert 1e-4 < errors["bfloat16"] < 0.05


def test_wrong_logits_are_noticed():
    llm = made(dtype="float32", backend="eager")
    assert error_of(llm) < 1e-5
    graph = llm.engine.graph
    llm.engine.graph = lambda *args: (graph(*args)[0] * 1.01,)
    assert error_of(llm) > 1e-3


def test_what_is_wrong_in_decode_steps_alone_is_noticed():
    llm = made(dtype="float32", backend="eager")
    graph = llm.engine.graph
    llm.engine.graph = lambda *args: (graph(*args)[0] * (1.5 if args[0].numel() == 1 else 1.0),)
    note = logits_note(llm, IDS)
    assert "e-07 of their norm" in note and note.endswith("; 5.0e-01 in decode steps")


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", short(["mixtral", "qwen3-moe"], "qwen3-moe"))
def test_experts_are_compared_too(family):
    llm = LLM(f"tiny-{family}", dtype="float32", device="cpu", backend="eager", kv_cache_memory="8MiB")
    assert error_of(llm) < 1e-5


def test_a_model_that_does_not_run_in_float64_is_told(monkeypatch):
    def refuses(*_):
        raise RuntimeError("no kernel for Double\nand more")

    monkeypatch.setattr(quality, "in_float64", refuses)
    note = logits_note(made(dtype="float32", backend="eager"), IDS)
    assert note.endswith("which the model does not run in: no kernel for Double")


def test_where_float64_does_not_fit_that_is_said(monkeypatch):
    monkeypatch.setattr(quality, "free_memory", lambda _: 1000)
    note = logits_note(made(dtype="float32", backend="eager"), IDS)
    assert note.startswith("logits: not compared with float64, which takes") and note.endswith("that are free")
