"""A package from outside goes through every verb as graft's own transforms do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import graft
from package_cases import MODEL, NAME, OP, install, install_afresh, make_package
from processes import run_python

# one process for all verbs: capturing the model takes longer than the verbs themselves
DRIVER = """
import contextlib, io, json, sys
from graft.__main__ import main

results = []
for words in json.loads(sys.argv[1]):
    out, err, sys.argv = io.StringIO(), io.StringIO(), ["graft", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
    results.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""
ON = ["--set", f"transforms.{NAME}.enabled=true"]


def environment(*paths: Path, **more: str) -> dict[str, str]:
    source = Path(graft.__file__).parents[1]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (source, *paths))), "OMP_NUM_THREADS": "1", **more}


def run_all(commands: list[list[str]], site: Path, cwd: Path, **more: str) -> list[tuple[int, str, str]]:
    done = run_python("-c", DRIVER, json.dumps(commands), cwd=cwd, env=environment(site, **more))
    assert done.returncode == 0, done.stderr
    return [tuple(result) for result in json.loads(done.stdout.splitlines()[-1])]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder that the package is installed in, and nothing else of it is left."""
    folder = tmp_path_factory.mktemp("package")
    return install(make_package(folder).root, folder / "site")


RUN = ["run", "-m", MODEL, "--token-ids", "5,6,7", "--max-tokens", "2", "--json"]


def answers_of(found: dict[str, tuple[int, str, str]]) -> dict[str, Any]:
    for verb, (code, out, err) in found.items():
        assert code == 0 and "Traceback" not in err, f"{verb}: {out}{err}"
    return {verb: json.loads(out) for verb, (_, out, _) in found.items()}


def test_an_installed_package_is_listed_and_runs(site, tmp_path):
    verbs = {
        "transforms": ["transforms", "--json"],
        "config": ["config", "--json"],
        "ops": ["ops", OP, "--json"],
        "models": ["models", "--json"],
        "run": [*RUN, "--backend", "eager", *ON],
        "native": [*RUN, "--backend", "native", *ON],
    }
    answers = answers_of(dict(zip(verbs, run_all(list(verbs.values()), site, tmp_path), strict=True)))
    listed = {row["name"]: row for row in answers["transforms"]["items"]}
    assert listed[NAME]["from"] == "cap-fusions 0.1.0" and listed["fuse_rope"]["from"] == f"graft {graft.__version__}"
    assert listed[NAME]["stage"] == "schedule" and not listed[NAME]["enabled"]
    assert answers["config"]["origins"][f"transforms.{NAME}.stage"] == "cap-fusions 0.1.0: graft.yaml"
    assert {row["kernel"] for row in answers["ops"]["items"]} == {"triton", "native", "reference"}
    assert answers["run"]["report"]["transforms"][NAME]["status"] == "applied"
    assert "native" in str(answers["native"]["report"]["kernels"][f"graft::{OP}"])  # C++ of the package
    tokens = [answers[verb]["outputs"][0]["token_ids"] for verb in ("run", "native")]
    assert tokens[0] == tokens[1]


@pytest.mark.exhaustive
def test_in_a_fresh_environment_it_goes_through_every_verb(tmp_path):
    """A virtual environment in which pip installed it, and nothing names it but its entry point."""
    small = ["--dtype", "float32"]
    python = install_afresh(make_package(tmp_path).root, tmp_path / "environment")
    shutil.rmtree(tmp_path / "cap-fusions")
    cells = ["--batch", "1", "--prompt", "4", "--new", "2", "--repeats", "1", "--against", "eager", "--threads", "1"]
    verbs = {
        "strict": ["transforms", "--strict", "--json"],
        "run": [*RUN, "--compare", "--verify", *small, *ON],
        "dump": ["dump", MODEL, "-o", "run", "--weights", "--verify", "--json", *small, *ON],
        "diff": ["diff", "run", "--transform", NAME, "--json"],
        "repro": ["repro", "run", "--match", f"{NAME}:1", "-o", "repro.py", "--json"],
        "explain": ["explain", MODEL, NAME, "--verify", "--json", *small],
        "report": ["report", "run", "-o", "report.html", "--json"],
        "pt2": ["export", "run", "-f", "pt2", "-o", "step.pt2", "--json"],
        "perfetto": ["export", "run", "-f", "perfetto", "-o", "step.json", "--json"],
        "check": ["check", NAME, "--model", MODEL, "--json"],
        "compare": ["compare", MODEL, "--layers", "--json", *small, *ON],
        "bench": ["bench", MODEL, *cells, "--json", *small, *ON],
        "discover": ["discover", MODEL, "--json", "--measure", "none", *small],
    }
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}

    def fresh(*arguments: str) -> str:
        done = subprocess.run([python, *arguments], cwd=tmp_path, env=own, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    found = json.loads(fresh("-c", DRIVER, json.dumps(list(verbs.values()))).splitlines()[-1])
    answers = answers_of(dict(zip(verbs, map(tuple, found), strict=True)))
    assert answers["run"]["report"]["transforms"][NAME]["matches"][0]["numeric_check"]
    compared = answers["run"]["comparison"]
    assert compared["ok"] and len(compared["graphs"]) == 1  # --dtype names one
    assert answers["diff"]["graph"]["counts"]["added"] == 1
    assert "import cap_fusions" in (tmp_path / "repro.py").read_text()
    fresh("repro.py")
    assert len(answers["explain"]["matches"]) == 1 and answers["explain"]["matches"][0]["numeric_check"]
    assert (tmp_path / "report.html").read_text().count(NAME) > 1
    assert any("cap_fusions" in note for note in answers["pt2"]["notes"])
    lines = {line["check"]: line for line in answers["check"]["transforms"][0]["lines"]}
    assert {line["verdict"] for line in lines.values()} == {"pass", "skip"}
    assert {line["verdict"] for line in answers["check"]["whole"]} == {"pass"} and len(answers["check"]["whole"]) == 3
    assert lines["matches"]["reason"].startswith("1 = 1 (L")  # counted by the package's own overlay of the registry
    assert lines["negative tests"]["verdict"] == "pass"  # the tests are installed with it
    assert answers["compare"]["boundaries"] and answers["compare"]["drift"] is None
    assert answers["bench"]["rows"] and answers["discover"] is not None


COMPILED = f"""
import torch
import graft

def cap(x):
    return torch.tanh(x / 30.0) * 30.0

x = torch.randn(2, 3, 8)
on = {{"transforms": {{"{NAME}": {{"enabled": True}}}}}}
compiled = graft.compile(cap, (x,), config=on)
assert len(compiled.report.transforms["{NAME}"].matches) == 1
torch.testing.assert_close(compiled(x), cap(x))
compiled.save("saved")
backend = graft.Backend(on, inductor=False)
torch.testing.assert_close(torch.compile(cap, backend=backend)(x), cap(x))
assert backend.reports[0].transforms["{NAME}"].matches
"""


@pytest.mark.exhaustive
def test_compile_torch_compile_and_a_saved_module(site, tmp_path):
    """The op is found again by a process that imports nothing but graft."""
    load = "import torch, graft\nx = torch.randn(2, 3, 8)\nprint(graft.load('saved')(x).shape)"
    for text in (COMPILED, load):
        done = run_python("-c", text, cwd=tmp_path, env=environment(site))
        assert done.returncode == 0, done.stderr


@pytest.mark.exhaustive
def test_the_tests_of_the_package_pass(site, tmp_path):
    """Installed, and nothing but installed."""
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "cap_fusions")
    done = run_python(*command, cwd=tmp_path, env=environment(site))
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout
