"""Graphs with ops that have no native kernel: native and eager regions in turn, with the reasons in the report."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import pytest
import torch
from typer.testing import CliRunner

from conftest import tiny
from graft import LLM, SamplingParams
from graft.backends.native.plan import LOWERINGS
from graft.base.errors import BadIndex, KernelUnavailable, NothingNative, UsageError
from graft.cli.app import app
from marks import left_out
from native_cases import needs_compiler, one_sequence

pytestmark = needs_compiler
ops, aten = torch.ops.graft, torch.ops.aten
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1] * 2]


def tokens(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


@cache
def eager_tokens(family: str) -> list[list[int]]:
    return tokens(built(family, "eager"))


def built(family: str, backend: str = "native", **options) -> LLM:
    return LLM(tiny(family, options.pop("dtype", "float32")), backend=backend, kv_cache_memory="8MiB", **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "op", "count"),
    [
        left_out(("llama", ops.rope_attention.default, 2)),  # heads come from a native region and go back to one
        left_out(("gemma-2", ops.add_rms_norm.default, 3)),  # its parts are read by native nodes
        left_out(("gpt2", aten.tanh.default, 2)),  # in the middle of a chain that would be one loop
        ("qwen3-moe", ops.moe_route.default, 2),  # ids of experts go into a native region
    ],
)
def test_an_op_without_a_kernel_runs_eagerly_and_is_reported(family, op, count, monkeypatch):
    monkeypatch.delitem(LOWERINGS, op)
    llm = built(family)
    assert tokens(llm) == eager_tokens(family)
    note = next(note for note in llm.report.notes if note.startswith(f"native: eager at {count} sites: {op}"))
    assert "there is no native kernel" in note
    name = f"graft::{op._schema.name.removeprefix('graft::')}"
    assert op.namespace == "aten" or llm.report.kernels[name].names != ("native",)


@pytest.mark.exhaustive
@torch.no_grad()
def test_sixteen_bit_values_cross_the_borders(monkeypatch):
    """The arena is float32; what an eager node reads and gives is in the model's dtype."""
    whole = built("llama", dtype="bfloat16")
    monkeypatch.delitem(LOWERINGS, ops.rope_attention.default)
    parts = built("llama", dtype="bfloat16")
    given = tiny("llama", "bfloat16")  # the same weights: what is drawn in float32 may be other numbers
    wide = LLM(replace(given, module=copy.deepcopy(given.module).float()), backend="eager", kv_cache_memory="8MiB")
    assert any("in 3 regions" in note for note in parts.report.notes)
    places = torch.arange(21)
    wanted, *found = (
        llm.engine.graph(*one_sequence(places), *llm.engine.tensors)[0].float() for llm in (wide, whole, parts)
    )
    (other,) = wide.engine.graph(*one_sequence(places + 1), *wide.engine.tensors)
    bound = 0.05 * wanted.abs().max()
    assert all((logits - wanted).abs().max() < bound for logits in found)
    assert (other - wanted).abs().max() > bound  # another prompt is told from this one


@pytest.mark.exhaustive
def test_nothing_to_lower_is_said(monkeypatch):
    for op in list(LOWERINGS):
        monkeypatch.delitem(LOWERINGS, op)
    with pytest.raises(NothingNative, match="there is no native kernel of aten"):
        built("llama")
    llm = LLM(tiny("llama"), kv_cache_memory="8MiB")  # nobody asked for native by name
    assert llm.backend == "eager" and tokens(llm) == eager_tokens("llama")
    assert any("backend: eager" in note and "there is no native kernel" in note for note in llm.report.notes)


@pytest.mark.exhaustive
def test_a_kernel_that_the_configuration_names_is_run():
    llm = built("llama", config={"kernels": {"rope_attention": "reference"}})
    assert tokens(llm) == eager_tokens("llama")
    assert llm.report.kernels["graft::rope_attention"].names == ("reference",)
    with pytest.raises(KernelUnavailable):
        built("llama", config={"kernels": {"rope_attention": "whole"}})


@pytest.mark.exhaustive
def test_a_token_that_the_model_lacks_is_an_error_and_the_step_goes_on():
    llm = built("llama")
    graph, tensors, inputs = llm.engine.graph, llm.engine.tensors, one_sequence(torch.tensor([5]))
    (right,) = graph(*inputs, *tensors)
    for wrong in (10_000, -1):
        with pytest.raises(BadIndex, match=r"model\.embed_tokens"):
            graph(torch.tensor([[wrong]]), *inputs[1:], *tensors)
    (again,) = graph(*inputs, *tensors)
    assert torch.equal(right, again) and right.isfinite().all()


def test_two_rows_of_tokens_are_refused():
    llm = built("llama")
    with pytest.raises(UsageError, match="pack them"):
        llm.engine.graph(torch.ones(2, 3, dtype=torch.int64), *[torch.zeros(1)] * (8 + len(llm.engine.tensors)))


FUSIONS = (
    "fuse_residual_into_matvec", "fuse_norm_into_matvec", "fuse_swiglu_into_matvec", "tabulate_rope",
    "fuse_rope_kv_write", "fuse_rope_into_attention",
)  # fmt: skip


def test_what_is_fused_on_a_gpu_is_fused_for_the_native_backend():
    native, eager = (built("llama", backend).report.transforms for backend in ("native", "eager"))
    assert {native[name].status for name in FUSIONS} == {"applied"}
    assert {eager[name].status for name in FUSIONS} == {"skipped"}
    assert native["widen_linear"].reason == "the native backend widens weights as it reads them"


@pytest.mark.exhaustive
def test_unfused_graphs_are_lowered_too():
    """With the fusions kept to a GPU: norms, rotations, gates and sums by themselves. Cosines stay eager."""
    llm = built("llama", config={"transforms": {name: {"devices": ["cuda"]} for name in FUSIONS}})
    assert {llm.report.transforms[name].status for name in FUSIONS} == {"skipped"}
    assert tokens(llm) == eager_tokens("llama")
    ops_run = {"graft::rms_norm", "graft::add_rms_norm", "graft::rope", "graft::paged_attention", "graft::swiglu"}
    assert {name for name, kernel in llm.report.kernels.items() if kernel.names == ("native",)} == ops_run
    assert any("native: eager at" in note and "aten.cos" in note for note in llm.report.notes)


def test_the_command_line_runs_it():
    result = CliRunner().invoke(
        app, ["run", "-m", "tiny-llama", "--token-ids", "5,6,7", "--backend", "native", "--max-tokens", "8", "--json"]
    )
    document = json.loads(result.stdout)
    assert result.exit_code == 0 and document["backend"] == "native"
    assert len(document["outputs"][0]["token_ids"]) == 8


@pytest.mark.exhaustive
def test_engines_that_share_their_code_run_at_the_same_time():
    """Each thread has an engine of its own; both load the same shared object."""
    expected = eager_tokens("llama")
    engines = [built("llama") for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(lambda llm=llm: [tokens(llm) for _ in range(30)]) for llm in engines]
        assert all(found == expected for run in runs for found in run.result())
