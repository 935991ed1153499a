"""graft bench with ranks: what each device reads, what is said of exchanges, and which baselines there are."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from conftest import tiny
from document_schemas import follows
from graft.base.errors import UsageError
from graft.bench.limits.traffic import prompt_flops, step_bytes
from graft.bench.ranks import devices_of, lowered_of, no_baselines, quantized_bytes, rank_facts
from graft.cli.app import app
from graft.dist.group import TorchGroup
from graft.engine.artifact.model import StoredConfig, StoredModule
from graft.engine.ranks.leader import LeaderGraph

pytest.importorskip("jsonschema")


@dataclass
class HalfModel:
    """An LLM whose part of a weight is 6 bytes."""

    backend: str
    engine: SimpleNamespace = field(init=False)

    def __post_init__(self):
        group = TorchGroup(0, 2, self.backend, None, None)
        leader = LeaderGraph("lowered", group, 2)
        leader.steps, leader.seconds = 4, 2.0
        group.calls, group.bytes, group.seconds = 24, 4096, 0.5
        self.engine = SimpleNamespace(graph=leader)

    @property
    def graph_module(self):
        class Part(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.q = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.int8), requires_grad=False)

            def forward(self):
                return self.q * 2

        return torch.fx.symbolic_trace(Part())


def test_ranks_of_one_machine_read_everything_together_and_gpus_their_part():
    shared, own = HalfModel("gloo"), HalfModel("nccl")
    assert [devices_of(one) for one in (shared, own)] == [1, 2]
    assert quantized_bytes(shared, 1) == quantized_bytes(own, 1) == 12
    assert lowered_of(shared) == "lowered"
    alone = SimpleNamespace(engine=SimpleNamespace(graph="whole"), graph_module=shared.graph_module)
    assert (devices_of(alone), quantized_bytes(alone, 1), lowered_of(alone), rank_facts(alone)) == (1, 6, "whole", {})


def test_the_share_of_exchanges_is_told_where_it_can_be_measured():
    told = rank_facts(HalfModel("gloo"))["tensor_parallel"]
    assert told == {
        "ranks": 2, "backend": "gloo", "exchanges_of_a_step": 6, "bytes_of_a_step": 1024, "communication_share": 0.25,
    }  # fmt: skip
    assert rank_facts(HalfModel("nccl"))["tensor_parallel"]["communication_share"] is None


def test_baselines_need_all_weights():
    assert no_baselines(("eager", "compile"), False, 2) == ()
    assert no_baselines(("eager",), True, 1) == no_baselines(("eager",), False, 1) == ("eager",)
    assert no_baselines((), True, 2) == ()
    with pytest.raises(UsageError, match="graft alone: eager would need all weights in one process"):
        no_baselines(("eager",), True, 2)


def test_a_compiled_engine_is_measured_alone():
    assert no_baselines(("eager", "compile"), False, 1, compiled=True) == ()
    with pytest.raises(UsageError, match=r"a compiled engine is measured alone: .* for eager; leave --against"):
        no_baselines(("eager",), True, 1, compiled=True)


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_what_a_step_of_a_compiled_engine_reads_is_that_of_its_model(family):
    """Which is not there: tied embeddings and experts count as they do in the module."""
    module = tiny(family).module
    stored = StoredModule(StoredConfig(json.loads(module.config.to_json_string(use_diff=False))), module.dtype)
    for batch in (1, 8):
        assert step_bytes(stored, batch, 100) == step_bytes(module, batch, 100)
    assert prompt_flops(stored, 2, 50) == prompt_flops(module, 2, 50)
    with pytest.raises(UsageError, match="transformers has no 'own'"):
        step_bytes(StoredModule(StoredConfig({"model_type": "own"}), module.dtype), 1, 1)


@pytest.mark.parametrize("words", [["--against", "eager"], ["--peers"]])
def test_the_command_refuses_them_before_anything_starts(words):
    done = CliRunner().invoke(app, ["bench", "tiny-llama", "--tensor-parallel", "2", "--json", *words])
    assert done.exit_code == 2 and "leave --against and --peers out" in done.output


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("bench", ["--batch", "1,2", "--prompt", "8", "--new", "4", "--repeats", "1"]),
        ("bench-kernels", ["--kernels", "--batch", "1", "--prompt", "8", "--new", "4"]),
        ("bench-load", ["--throughput", "8/4", "--requests", "4"]),
    ],
)
def test_two_ranks_are_measured(document, words):
    threads = torch.get_num_threads()
    asked = ["bench", "tiny-llama", "--tensor-parallel", "2", "--dtype", "float32", "--backend", "eager", "--json"]
    try:
        done = CliRunner().invoke(app, [*asked, *words])
    finally:
        torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    assert follows(told) == document
    ranks = told["setup"]["tensor_parallel"]
    assert (ranks["ranks"], ranks["backend"], ranks["exchanges_of_a_step"]) == (2, "gloo", 6)
    assert 0 < ranks["communication_share"] < 1
    if document == "bench":
        assert [row["engine"] for row in told["rows"]] == ["graft", "graft"]
    if document == "bench-kernels":
        assert any("allreduce" in row["name"].replace("_", "") for row in told["steps"][0]["rows"])
