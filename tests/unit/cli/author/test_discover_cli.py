"""`graft discover` as people call it: text, JSON, Markdown, exit codes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from graft.cli.app import app
from graft.passes.config import load_config
from graft.workbench.dump import dump_model

SWIGLU_OFF = ("--set", "transforms.fuse_swiglu.enabled=false")


def call(*args):
    return CliRunner().invoke(app, ["discover", *args])


@pytest.mark.exhaustive
def test_text_names_assumptions_kernel_and_place():
    done = call("tiny-llama", *SWIGLU_OFF, "--top", "1")
    assert done.exit_code == 0
    for text in ("4620 GB/s, 1.5 µs a launch", "s70 = 1 and 512", "use_existing_kernel  gemm_epilogue × 2"):
        assert text in done.stdout
    assert "found graft::swiglu in graft/ops/swiglu/op.py by fuse_swiglu" in done.stdout
    assert "model.layers.*.mlp × 2" in done.stdout and "aten.silu(" in done.stdout


def test_nothing_left_is_said_and_no_failure():
    done = call("tiny-llama", "--top", "1")
    assert done.exit_code == 0 and "nothing worthwhile is left: " in done.stdout


def test_json_is_one_document_and_numbers_can_be_given():
    done = call("tiny-llama", *SWIGLU_OFF, "--json", "--tokens", "4", "--bandwidth", "100", "--launch-us", "7")
    found = json.loads(done.stdout)
    assert found["machine"] == {"bandwidth_gb_s": 100.0, "launch_us": 7.0, "source": "as given"}
    first = found["candidates"][0]
    assert first["lookup"] == "found" and first["existing"][0]["symbol"] == "graft::swiglu"
    (estimate,) = first["estimates"]
    saved = estimate["bytes_now"] - estimate["bytes_after"]
    assert estimate["tokens"] == 4 and estimate["saving_us"] == pytest.approx(2 * 7 + saved / 100e3)
    assert first["reference"].startswith("import torch") and found["nothing_left"] == ""


def test_markdown_has_a_table_and_the_graph():
    done = call("tiny-llama", *SWIGLU_OFF, "--markdown")
    assert done.stdout.startswith("# Fusion candidates of tiny-llama")
    assert "| gemm_epilogue | silu → mul | 2 |" in done.stdout and "```" in done.stdout


@pytest.mark.exhaustive
def test_a_folder_of_dumps_by_step(tmp_path):
    run = tmp_path / "run"
    dump_model("tiny-llama", run, load_config())
    before = call(str(run), "--step", "fuse_rms_norm")
    assert before.exit_code == 0 and "tiny-llama after fuse_rms_norm" in before.stdout
    assert "graft::rope" in before.stdout and "graft::swiglu" in before.stdout
    after = call(str(run))
    assert after.exit_code == 0 and "nothing worthwhile is left" in after.stdout
    changed = call(str(run), *SWIGLU_OFF)
    assert changed.exit_code == 2 and "cannot change" in changed.stderr


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (("tiny-lama",), 2, "did you mean"),
        (("tiny-llama", "--step", "fuse_rope"), 2, "--step fuse_rope is for a folder of dumps"),
        (("tiny-llama", "--tokens", "0"), 2, "--tokens 0"),
        (("tiny-llama", "--set", "transforms.fuse_ropes.enabled=false"), 2, "did you mean"),
        ((".",), 1, "neither a folder of dumps"),
    ],
)
def test_bad_input_gets_one_line(args, code, told):
    done = call(*args)
    assert done.exit_code == code and told in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.exhaustive
def test_candidates_are_timed_where_a_device_is_named():
    """The spelled-out norm of a tiny model, on a CPU: calls, the kernel that exists, a copy."""
    off = ["--set", "transforms.fuse_rms_norm.enabled=false", "--set", "transforms.fuse_add_rms_norm.enabled=false"]
    shown = call("tiny-llama", "--measure", "cpu", "--tokens", "4", "--top", "1", *off)
    assert shown.exit_code == 0, shown.output
    assert "measured     4 tokens: a site takes" in shown.output and "by the existing kernel" in shown.output
    found = json.loads(call("tiny-llama", "--measure", "cpu", "--tokens", "4", "--json", *off).stdout)
    first = found["candidates"][0]["measured"][0]
    assert first["problem"] == "" and first["sites"] == found["candidates"][0]["count"]
    assert first["now_us"] > 0 and first["copy_us"] > 0 and first["existing_us"] > 0
    assert first["saving_us"] == pytest.approx(max(0, first["now_us"] - first["existing_us"]) * first["sites"])


@pytest.mark.exhaustive
def test_nothing_is_timed_without_a_gpu_or_when_told():
    assert "a site takes" not in call("tiny-gpt2", "--measure", "none").output
    wrong = call("tiny-gpt2", "--measure", "tpu")
    assert wrong.exit_code == 2 and "auto, cuda, cpu or none" in wrong.output
