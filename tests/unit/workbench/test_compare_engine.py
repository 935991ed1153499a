"""How far an engine's logits are from float64, over prompt, decode steps and mixed batches, and in which dtype a
transform is wrong: noticed, and named with its match."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from check_cases import capture_once, faulty_swiglu, scale
from faulty_ops import FAULTS
from graft import LLM
from graft.bench.quality import logits_error
from graft.engine.setup.stages import settings_for
from graft.models.load import load_model
from graft.workbench.check.scenario import scenario_of
from graft.workbench.compare import engine
from graft.workbench.compare.engine import DTYPES, compare_engine, engine_steps_off
from marks import short
from native_cases import needs_compiler

IDS = [5, 6, 7, 11, 3]
KINDS = ("prompt", "decode steps", "mixed batch")


@pytest.fixture(scope="module", autouse=True)
def captured():
    with pytest.MonkeyPatch.context() as patch:
        capture_once(patch)
        yield


def made(model="tiny-llama", **options) -> LLM:
    return LLM(model, device="cpu", kv_cache_memory="8MiB", keep_weights=True, **options)


@pytest.fixture(scope="module")
def llm():
    return made(dtype="float32", backend="eager")


def steps_of(llm: LLM, ids=IDS):
    steps, problem = engine_steps_off(llm, scenario_of(ids))
    assert not problem and tuple(step.kind for step in steps) == KINDS
    return {step.kind: step for step in steps}


def error_of(llm: LLM) -> float:
    return max(step.error for step in steps_of(llm).values())


def compared(llm: LLM, ids=IDS, dtypes=DTYPES):
    load = {"device": "cpu"}
    return compare_engine(
        llm, ids, lambda dtype: load_model(llm.model.name, dtype=dtype, **load), settings_for(llm.model, None),
        dtypes=dtypes,
    )  # fmt: skip


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


@pytest.mark.parametrize(
    ("wrong_for", "noticed"),
    [
        (lambda batch: True, KINDS),
        (lambda batch: batch[0].numel() == 1, ("decode steps",)),
        (lambda batch: batch[0].numel() == 7, ("mixed batch",)),  # one token beside prompts of 5 and 1
        (lambda batch: batch[0].numel() > 64, ("prompt",)),
    ],
)
def test_wrong_logits_are_noticed_in_the_step_that_has_them(llm, monkeypatch, wrong_for, noticed):
    assert not any(step.wrong for step in steps_of(llm).values())
    graph = llm.engine.graph
    monkeypatch.setattr(llm.engine, "graph", lambda *args: (graph(*args)[0] * (1.01 if wrong_for(args) else 1.0),))
    assert tuple(step.kind for step in steps_of(llm).values() if step.wrong) == noticed


def test_a_prompt_of_one_token_has_decode_steps_too(llm):
    assert not any(step.wrong for step in steps_of(llm, [7]).values())


@pytest.fixture(scope="module")
def right(llm):
    return compared(llm)


def test_a_right_engine_is_told_with_every_dtype(right):
    assert not right.failures and [line.check for line in right.graphs] == ["in float32", "in bfloat16", "in float16"]
    assert json.loads(json.dumps(right.to_dict()))["ok"] is True
    first, second = right.lines()
    assert all(kind in first for kind in KINDS) and all(line.check in second for line in right.graphs)


def test_a_dtype_that_was_named_is_the_only_one(llm):
    assert [line.check for line in compared(llm, dtypes=()).graphs] == ["in float32"]


def test_a_backend_that_is_wrong_by_itself_is_not_blamed_on_a_transform(llm, right, monkeypatch):
    graph = llm.engine.graph
    monkeypatch.setattr(llm.engine, "graph", lambda *args: (graph(*args)[0] * 1.01,))
    (told,) = replace(right, steps=tuple(steps_of(llm).values())).failures
    assert all(kind in told for kind in KINDS) and told.endswith("no transform is to blame, so the backend is: eager")


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("fault", "wrong_in"),
    [
        ("in bfloat16", {"in bfloat16"}),
        ("one token", {"in float32", "in bfloat16", "in float16"}),
        ("in float16", {"in float16"}),
        ("above 64 tokens", {"in float32", "in bfloat16", "in float16"}),
    ],
)
def test_the_transform_and_match_to_blame_are_named_in_the_dtype_that_shows_it(llm, monkeypatch, fault, wrong_in):
    """The engine itself was built without the fault: the graphs are made anew. In 16 bits a fault must be larger than
    the roundings of the whole model to show here; the numeric check of the match sees smaller ones."""
    real = FAULTS[fault]
    monkeypatch.setitem(FAULTS, fault, lambda value, gate, up: value + 6 * (real(value, gate, up) - value))
    faulty_swiglu(monkeypatch, fault, at=1)
    found = compared(llm)
    assert {line.check for line in found.graphs if line.verdict == "fail"} == wrong_in
    named = (found.bisection.transform, found.bisection.number, found.bisection.matches)
    assert named == ("fuse_swiglu", 2, 2)
    assert all("first bad: fuse_swiglu, match 2 of 2 at %" in text for text in found.failures)
    assert found.to_dict()["bisection"]["transform"] == "fuse_swiglu"


@pytest.mark.exhaustive
def test_a_fault_that_a_later_transform_lays_bare_is_blamed_on_its_own(llm, monkeypatch):
    faulty_swiglu(monkeypatch, "strided", at=1)
    found = compared(llm).bisection
    assert (found.transform, found.number) == ("fuse_swiglu", 2) and found.exposed_by.startswith("merge_")


@pytest.mark.exhaustive
def test_what_is_quantized_is_not_judged_by_float64(monkeypatch):
    found = compared(made(dtype="float32", backend="eager", quantize="int4"))
    assert not found.failures and found.not_judged.startswith("not judged, since weights are in")
    assert any(step.wrong for step in found.steps)  # they are told all the same
    assert not any(step["wrong"] for step in found.to_dict()["steps"])
    scale(monkeypatch, "fuse_rms_norm", 1.1, at=[2])
    found = compared(made(dtype="float32", backend="eager", quantize="int4"))
    assert found.failures and found.bisection.transform == "fuse_rms_norm"


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", short(["mixtral", "qwen3-moe"], "qwen3-moe"))
def test_experts_are_compared_too(family):
    assert error_of(made(f"tiny-{family}", dtype="float32", backend="eager")) < 1e-5


def test_a_model_that_does_not_run_in_float64_is_told(llm, monkeypatch):
    def refuses(*_):
        raise RuntimeError("no kernel for Double\nand more")

    monkeypatch.setattr(engine, "float64_twin", refuses)
    steps, problem = engine_steps_off(llm, scenario_of(IDS))
    assert not steps and problem.endswith("which the model does not run in: no kernel for Double")


def test_where_memory_does_not_suffice_that_is_said(llm, monkeypatch):
    monkeypatch.setattr(engine, "free_memory", lambda _: 1000)
    found = compared(llm)
    assert found.problem.startswith("not compared with float64, which takes") and not found.steps
    assert [line.verdict for line in found.graphs] == ["skip"] * 3 and not found.failures
    assert all("are free" in text for text in found.lines())
