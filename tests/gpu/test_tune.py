"""Tuning on a GPU, at tiny sizes: every candidate computes the product, and what is measured is looked up."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import graft
from graft.bench.tune.results import StepSample
from graft.bench.tune.search import candidates, tune
from graft.cli.app import app
from graft.engine.setup.choices import model_shapes
from graft.ops.fused_linear import choice
from graft.ops.fused_linear.choice import Matvec, choose_kernel, overridden, tuned_file
from graft.ops.fused_linear.kinds import Gemm, LinearShape, how_text
from graft.ops.fused_linear.reference import fused_linear
from graft.ops.fused_linear.tables import TunedEntry, read_table, write_table

SHAPES = [
    LinearShape(256, 1024, format, gated, norm)
    for format in ("plain", "int8", "fp8", "int4")
    for gated, norm in ((False, False), (True, True))
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path))
    choice.forget()
    yield tmp_path
    choice.forget()


def device():
    return torch.device("cuda", torch.cuda.current_device())


def wide(call):
    """The op's reference in float64 on the same numbers; quantized weights stay as they are."""
    given = call._asdict()
    plain = call.scale is None
    for name in ("x", "bias", "norm", "residual", *(("weight",) if plain else ("scale",))):
        given[name] = None if given[name] is None else given[name].double()
    return fused_linear(**given)


def off(given, expected):
    return float((given.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("tokens", [1, 3, 16, 40])
@pytest.mark.parametrize("shape", SHAPES, ids=LinearShape.key)
def test_every_candidate_computes_the_product(shape, tokens):
    from triton.runtime.errors import OutOfResources

    from graft.bench.tune.timers import make_calls
    from graft.ops.fused_linear.triton import run_as

    torch.manual_seed(0)
    call = make_calls(shape, tokens, device())[0]
    expected = wide(call)
    # bf16: 2^-9 for the result, some more for what is rounded inside (the normed row, the gate)
    limit = 0.02
    ran = 0
    for how in candidates(shape, tokens):
        try:
            error = off(run_as(call, how), expected)
        except OutOfResources:  # `graft tune` names it as one that did not run
            continue
        ran += 1
        assert error < limit, f"{how_text(how, shape.format)}: {error:.3g}"
    assert ran > len(list(candidates(shape, tokens))) // 2
    changed = call.x.clone()
    changed[:, : shape.k // 4] = 0
    assert off(run_as(call._replace(x=changed), None), expected) > limit  # a part of the depth left out is seen


def test_what_is_measured_is_looked_up():
    from graft.ops.launch import device_name

    name = device_name(device())
    told = []
    found = tune(SHAPES[:2], [1, 8], device(), lambda *args: told.append(args))
    assert len(told) == 4 and set(found.table) == set(SHAPES[:2])
    assert all(trial.times[trial.best] == min(trial.times.values()) > 0 for trial in found.trials)
    write_table(found.table, tuned_file(name))
    choice.forget()
    for trial in found.trials:
        chosen = choose_kernel(trial.shape, trial.tokens, name)
        assert chosen.how == trial.best and chosen.source.startswith(f"measured on {name} alone, this shape")


def test_a_candidate_that_needs_too_much_is_told():
    from graft.bench.tune.timers import KernelTimer

    large = Gemm(256, 128, 256, 1, 4, 8)  # more shared memory than any GPU has
    fits, told = KernelTimer(device())(SHAPES[0], 128, [Gemm(64, 128, 64, 1, 4, 2), large])
    assert isinstance(fits, float) and fits > 0
    assert isinstance(told, str) and "OutOfResources" in told


def test_an_override_changes_the_kernels_of_a_recorded_step(monkeypatch):
    """DecodeTimer records anew, so the kernels that the table names are launched."""
    from graft.bench.tune.timers import DecodeTimer
    from graft.ops.fused_linear import triton as launches

    llm = graft.LLM("tiny-llama", dtype="bfloat16", device="cuda", enforce_eager=True, kv_cache_memory="64MiB")
    shapes = model_shapes(llm.graph_module)
    assert shapes
    seen = []
    real = launches.launch_matvec
    monkeypatch.setattr(launches, "launch_matvec", lambda call, how: seen.append(how) or real(call, how))
    entries = {shape: {1: TunedEntry(Matvec(4, 8), 0.0, "here")} for shape in shapes}
    with overridden(entries):
        sample = DecodeTimer(llm)(1)
    assert isinstance(sample, StepSample) and sample.us > 0, sample
    assert set(seen) == {Matvec(4, 8)}


def test_the_command(tmp_path):
    path = tmp_path / "mine.json"
    told = CliRunner().invoke(app, ["tune", "tiny-llama", "--tokens", "1,4", "-o", str(path), "--json"])
    assert told.exit_code == 0, told.stderr
    document = json.loads(told.stdout)
    assert {step["tokens"] for step in document["steps"]} == {1, 4}, document["failures"]
    tried = [one for one in document["tried"] if one["shape"]]
    assert tried and all(0 < one["p50"] <= one["p99"] for one in document["tried"]), document["tried"]
    table = read_table(path)
    assert all(entry.measured == "in a step" for found in table.values() for entry in found.values())
    llm = graft.LLM("tiny-llama", dtype="bfloat16", device="cuda", kv_cache_memory="64MiB", max_num_seqs=4)
    assert set(table) == set(model_shapes(llm.graph_module))
    assert any(note.startswith("fused_linear: ") for note in llm.report.notes)
