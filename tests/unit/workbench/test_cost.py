"""`graft explain --cost`: bytes and times of the kernels of a step, by layer."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from graft.bench.kernels.node_times import launch_us
from graft.cli.app import app
from graft.passes.config import load_config
from graft.passes.registry import TransformRegistry
from graft.workbench.cost import Speed, StepShape
from graft.workbench.cost_of import estimated_cost, machine_speed, measured_cost
from marks import short

SPEED = Speed(gb_per_s=2.0, launch_us=3.0, how="given")


def cost(model, batch=1, context=100, **options):
    return estimated_cost(model, load_config(**options), StepShape(batch, context), SPEED, "float32")


def command(*args):
    return CliRunner().invoke(app, ["explain", *args])


@pytest.fixture(scope="module")
def gemma():
    return cost("tiny-gemma-2")


def test_bytes_of_weights_cache_and_activations(gemma):
    """Hidden 32, 4 heads of 16, 2 key-value heads, MLP of 64, windows of 8 in every second layer; float32."""
    (first, second, outside) = gemma.layers().values()
    found = {(k.op, k.place): k for k in first}
    o_proj = found["graft.fused_linear", "self_attn.o_proj"]
    assert o_proj.reads == "weights" and o_proj.bytes == 4 * (32 * 64 + 64 + 32)
    assert o_proj.us == pytest.approx(o_proj.bytes / 2e3 + 3.0)
    norm = found["graft.rms_norm", "post_attention_layernorm"]
    assert (norm.reads, norm.fused, norm.bytes) == ("activations", False, 4 * 4 * 32)  # with the residual
    assert "fuse_norm_into_matvec" in norm.reason and not o_proj.reason
    window, full = (next(k.bytes for k in layer if k.reads == "cache") for layer in (first, second))
    assert full - window == 2 * 2 * 16 * 4 * (100 - 8)
    head = next(k for k in outside if k.place == "lm_head" and k.fused)
    assert head.bytes == 4 * (128 * 32 + 32 + 32 + 128)


def test_views_are_no_kernels_and_lookups_read_rows(gemma):
    names = [kernel.op for kernel in gemma.kernels]
    assert "aten.reshape" not in names and "aten.transpose.int" not in names
    rows = next(k for k in gemma.kernels if k.op == "aten.embedding")
    assert rows.bytes == 4 * 2 * 32 and not rows.fused


def test_sums_and_groups(gemma):
    assert gemma.total(gemma.kernels) == pytest.approx(sum(k.us for k in gemma.kernels))
    assert 0 < gemma.total(gemma.unfused) < gemma.total(gemma.kernels)
    data = gemma.to_dict()
    assert (
        data["unfused"]["kernels"] == len(gemma.unfused) == sum(k["reads"] == "activations" for k in data["kernels"])
    )
    assert list(cost("tiny-llama").layers()) == [(0, 1), None]
    assert list(gemma.layers()) == [(0,), (1,), None]  # only one has a window
    json.dumps(data)


def test_a_fusion_that_is_off_shows_as_kernels():
    on, off = cost("tiny-llama"), cost("tiny-llama", sets=["transforms.fuse_swiglu_into_matvec.enabled=false"])
    added = [k for k in off.unfused if k.op == "graft.swiglu"]
    assert len(added) == 2 and len(off.unfused) == len(on.unfused) + 2


def test_what_a_transform_that_is_off_would_take_names_it():
    """LayerNorms of a default run; where it is on they are gone."""
    norms = [kernel for kernel in cost("tiny-starcoder2").kernels if kernel.op == "graft.layer_norm"]
    assert len(norms) == 5 and {kernel.reason for kernel in norms} == {"fuse_layer_norm_into_matvec is off"}
    on = cost("tiny-starcoder2", sets=["transforms.fuse_layer_norm_into_matvec.enabled=true"])
    assert not [kernel for kernel in on.kernels if kernel.op == "graft.layer_norm"]


@pytest.mark.exhaustive
def test_of_experts_those_that_are_reached_count():
    """Two of four experts for one token; for more as many as an even router reaches."""
    one, three = (
        next(k for k in cost("tiny-qwen3-moe", batch).kernels if k.op == "graft.moe_experts") for batch in (1, 3)
    )
    expert = 3 * 32 * 32 * 4
    assert one.bytes == 2 * expert + 4 * (2 * 32 + 2) + 8 * 2
    assert three.bytes == 4 * expert * 7 // 8 + 3 * (4 * (2 * 32 + 2) + 8 * 2)


@pytest.mark.parametrize("backend", short(["native", "eager"], "native"))
def test_measured_kernels_have_times(backend):
    """Every kernel that runs; a chain of small ops that a native step computes is one."""
    found = measured_cost("tiny-gpt2", load_config(), StepShape(2, 8), "float32", "cpu", 2.0, 3.0, backend=backend)
    assert backend in found.measured and all(kernel.measured_us is not None for kernel in found.kernels)
    assert found.total(found.kernels, measured=True) > 0
    assert sum(kernel.reads == "cache" for kernel in found.kernels) == 2


def test_the_speed_of_the_machine():
    given = machine_speed(torch.device("cpu"), 5.0, 0.5)
    assert (given.gb_per_s, given.launch_us, given.how) == (5.0, 0.5, "both given")
    assert "launch measured" in machine_speed(torch.device("cpu"), 5.0).how
    assert launch_us({str(i): float(i) for i in range(7)}) is None
    assert launch_us({str(i): float(i) for i in range(16)}) == 4.0
    told = TransformRegistry.with_key("devices")
    assert "fuse_norm_into_matvec" in told and "fuse_rms_norm" not in told


def test_the_command_prints_a_table_or_json():
    shown = command("tiny-llama", "--cost", "--bandwidth", "4000", "--launch", "1.5")
    assert shown.exit_code == 0 and "not fused: " in shown.stdout and "1.5 us a kernel" in shown.stdout
    data = json.loads(command("tiny-llama", "--cost", "--bandwidth", "4000", "--launch", "1.5", "--json").stdout)
    assert data["speed"]["launch_us"] == 1.5 and data["shape"] == {"batch": 1, "context": 128}


@pytest.mark.parametrize(("args", "message"), [
    (["--measure"], "add --cost"),
    (["--batch", "2"], "add --cost"),
    (["--cost", "fuse_rope"], "leave fuse_rope out"),
    (["--cost", "--batch", "0"], "--batch must be more than 0"),
    (["--cost", "--bandwidth", "-1"], "--bandwidth must be more than 0"),
])  # fmt: skip
def test_a_mistake_is_told_before_the_model_is_loaded(args, message, monkeypatch):
    monkeypatch.setattr("graft.workbench.cost_of.captured", lambda *_, **__: pytest.fail("it was loaded"))
    result = command("tiny-llama", *args)
    assert result.exit_code != 0 and message in f"{result.stdout}{result.stderr}{result.exception}"
