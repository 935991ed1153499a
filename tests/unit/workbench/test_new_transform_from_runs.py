"""What graft new-transform --from writes passes its tests, matches its model and keeps its numbers."""

from __future__ import annotations

import os

import pytest
from test_discover import OFF, GatedResidual
from test_new_transform import run_ruff
from test_new_transform_from import BLOCKS, seed
from test_new_transform_runs import run_pytest

from graft.base.errors import PatternError
from graft.passes.config import load_config
from graft.workbench.discover import discover_model
from graft.workbench.scaffold.candidate import seed_of
from graft.workbench.scaffold.plan import transform_from
from processes import run_python
from scaffold_cases import SOURCE, checkout_folder  # noqa: F401  (a fixture)

COMPILE = """
import importlib, sys
from pathlib import Path

import torch
import yaml
from test_discover import LAYERS, Stack
from test_new_transform_from import BLOCKS

import graft

for name, block in BLOCKS.items():
    importlib.import_module(name)
    config = yaml.safe_load(Path(f"{name}.yaml").read_text())
    config["transforms"][name]["enabled"] = True
    torch.manual_seed(0)
    model, x = Stack(block).eval(), torch.randn(2, 5, 16)
    compiled = graft.compile(model, (x,), config={**config, "verify": "matches"})
    record = compiled.report.transforms[name]
    assert len(record.matches) == LAYERS, (name, record.reason)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-6, atol=1e-6)
    off = {"transforms": {name: {**config["transforms"][name], "enabled": False}}}
    assert not graft.compile(model, (x,), config=off).report.transforms[name].matches
    print(name, len(record.matches), compiled.report.kernels[f"graft::{name.removeprefix('fuse_')}"])
"""


@pytest.mark.exhaustive
def test_novel_blocks_match_their_models_and_pass_their_tests(tmp_path):
    """Each of the three: count as discover said, equal numerics, and the generated tests pass."""
    for name, block in BLOCKS.items():
        written = transform_from(name, seed(block), tmp_path)
        assert written.op == name.removeprefix("fuse_")
        kernel = tmp_path / f"{written.op}_op" / "triton.py"
        assert kernel.exists() and written.no_kernel == ""
    text = (tmp_path / "fuse_scaled_norm.py").read_text()
    assert '"""rms_norm → exp → mul: found 3 times in Stack."""' in text
    assert "before:  %rms_norm = graft.rms_norm(%x, %weight, 1e-05)" in text
    listed = (tmp_path / "fuse_gated.yaml").read_text()
    assert "{stage: schedule, enabled: false, before: [schedule_streams]}" in listed
    done = run_pytest(tmp_path, tmp_path, path=SOURCE)
    assert done.returncode == 0 and "failed" not in done.stdout, done.stdout[-3000:]
    here = os.path.dirname(__file__)
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}:{here}:{tmp_path}", "OMP_NUM_THREADS": "1"}
    ran = run_python("-c", COMPILE, cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split()[:2] == ["fuse_cubed_relu", "3"] and ran.stdout.count("\n") == 3


@pytest.mark.exhaustive
def test_the_generated_tests_of_a_candidate_can_fail(tmp_path):
    transform_from("fuse_gated", seed(GatedResidual), tmp_path)
    reference = tmp_path / "gated_op" / "reference.py"
    right = reference.read_text()
    assert right.count("mul = sigmoid *") == 1
    reference.write_text(right.replace("mul = sigmoid *", "mul = 1.02 * sigmoid *"))
    done = run_pytest(tmp_path, tmp_path, "-k", "it_fuses", path=SOURCE)
    assert done.returncode == 1 and "FAILED test_fuse_gated.py::test_it_fuses" in done.stdout


@pytest.mark.exhaustive
def test_an_op_of_graft_takes_the_place_of_what_it_computes(tmp_path):
    """With its arguments filled in, and two results where the model reads two."""
    found = discover_model("tiny-llama", load_config(OFF))
    norm, rope, *_ = found.worthwhile
    written = transform_from("fuse_sum_and_norm", seed_of(norm, found.model), tmp_path)
    text = (tmp_path / "fuse_sum_and_norm.py").read_text()
    assert "torch.ops.graft.add_rms_norm.default(x, y, weight, 1e-06)" in text and "to(x.dtype)" in text
    assert written.op == "" and "fuse_add_rms_norm do this already" in written.note
    done = run_pytest(tmp_path, tmp_path, path=SOURCE)
    assert done.returncode == 0, done.stdout[-3000:]
    with pytest.raises(PatternError, match=r"graft::rope fits its model, but not all .* pass --op"):
        transform_from("fuse_rotation", seed_of(rope, found.model), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.exhaustive
def test_in_a_checkout_what_is_written_is_formatted_and_lint_free(checkout):
    pytest.importorskip("ruff", reason="ruff is not installed here")
    for name, block in BLOCKS.items():
        assert transform_from(name, seed(block), checkout).checkout
    found = discover_model("tiny-llama", load_config())
    kept = [c for c in found.candidates if not c.pattern_problem()]
    for index, candidate in enumerate(kept):
        transform_from(f"fuse_candidate{index}", seed_of(candidate, found.model), checkout, op=index % 2 == 0)
    assert len(kept) > 2
    defaults = (checkout / "src/graft/passes/default.yaml").read_text()
    assert "stage: schedule, enabled: false, before: [schedule_streams]}" in defaults
    for command in (["check"], ["format", "--check"]):
        done = run_ruff(checkout, *command)
        assert done.returncode == 0, done.stdout + done.stderr
