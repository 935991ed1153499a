"""What graft new-transform writes passes its own tests and the rules of the code, and its tests can fail."""

from __future__ import annotations

import os

import pytest
import yaml

from graft.workbench.scaffold.plan import new_transform
from processes import run_python
from scaffold_cases import GATED, SOURCE, checkout_folder, functions_file  # noqa: F401  (fixtures)


def run_pytest(folder, *args, path):
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    options = ("-q", "-p", "no:warnings", "-p", "no:cacheprovider")
    return run_python("-m", "pytest", *options, *args, cwd=folder, env=environment)


# ── a plugin ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.exhaustive
def test_plugins_pass_their_tests_as_generated(tmp_path, functions):
    """The worked example, an op made from a pattern with a kernel, and one whose replacement is there already."""
    folder, gated = tmp_path / "plugins", tmp_path / "functions" / "gated.py"
    gated.write_text(GATED)
    plain = new_transform("fuse_plain", folder)
    assert [p.name for p in plain.files] == ["fuse_plain.py", "test_fuse_plain.py", "fuse_plain.yaml"]
    made = new_transform("fuse_relu_squared", folder, op=True, pattern=f"{gated}:squared_relu_gate")
    assert made.op == "relu_squared" and made.no_kernel == ""
    kernel = (folder / "relu_squared_op" / "triton.py").read_text()
    assert "t0 = tl.maximum(gate, 0.0)\n    t1 = t0 * t0\n    t2 = t1 * up\n" in kernel
    new_transform("fuse_soft_cap", folder, op=True, pattern=f"{functions}:capped", stage="schedule")
    kernel = (folder / "soft_cap_op" / "triton.py").read_text()
    assert (
        "soft_cap_kernel(x_ptr, out, count, cap, slope, BLOCK" in kernel
        and "t0 = x / cap\n    t1 = tanh(t0)" in kernel
    )
    new_transform("fuse_norm", folder, pattern=f"{functions}:norm", replacement=f"{functions}:known")
    text = (folder / "fuse_norm.py").read_text()
    assert "after:   %rms_norm_default = graft.rms_norm(%x, %weight, eps)" in text and "import math" not in text
    assert "exact=False" in (folder / "fuse_plain.py").read_text() and "exact=False" not in text
    new_transform("fuse_projected", folder, op=True, pattern=f"{functions}:projected", shapes="x: b s d, w: n d")
    shapes = "ids: b s: int64, weight: v d"
    new_transform("fuse_looked_up", folder, op=True, pattern=f"{functions}:looked_up", shapes=shapes)
    listed = yaml.safe_load((folder / "fuse_plain.yaml").read_text())
    assert listed == {"transforms": {"fuse_plain": {"stage": "match", "enabled": False}}}
    done = run_pytest(folder, "-rs", folder, path=SOURCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU" in done.stdout and "failed" not in done.stdout


@pytest.mark.exhaustive
def test_the_generated_tests_can_fail(tmp_path):
    """A replacement that is changed afterwards is caught by the tests that came with it."""
    new_transform("fuse_plain", tmp_path)
    path = tmp_path / "fuse_plain.py"
    path.write_text(path.read_text().replace("F.silu(x)", "F.silu(x) * 1.02"))
    done = run_pytest(tmp_path, tmp_path, path=SOURCE)
    assert done.returncode == 1
    for name in ("test_it_fuses", "test_numbers_are_those_of_eager[float32-cpu]", "test_the_pattern_itself_is_found"):
        assert f"FAILED test_fuse_plain.py::{name}" in done.stdout, done.stdout


# ── a checkout ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.exhaustive
def test_in_a_checkout_the_rules_of_the_code_hold(checkout, monkeypatch):
    """One name for registry, YAML and file; op folders complete; families account for it; ruff has nothing to say."""
    monkeypatch.chdir(checkout / "src" / "graft" / "cli")
    made = new_transform("fuse_plain", op=True)
    assert made.checkout and made.root == checkout
    assert {p.name for p in made.changed} == {"default.yaml", "common.yaml"}
    new_transform("fuse_other", checkout, stage="schedule")
    defaults = (checkout / "src/graft/passes/default.yaml").read_text()
    entries = yaml.safe_load(defaults)["transforms"]
    assert entries["fuse_plain"] == {"stage": "match", "enabled": False}
    assert list(entries).index("fuse_plain") == list(entries).index("fuse_attention") + 1
    assert list(entries)[-1] == "fuse_other"
    before = (SOURCE / "graft/passes/default.yaml").read_text().splitlines()
    assert [line for line in defaults.splitlines() if line in before] == before  # comments and all
    done = run_pytest(
        checkout, "tests/unit", "-k",
        "fuse_plain or fuse_other or plain or one_name or op_folder or swallowed or one_way or every_transform",
        path=checkout / "src",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
