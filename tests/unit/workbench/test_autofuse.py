"""graft autofuse: what it decides, what it keeps between runs, and that nothing a kernel does ends the run."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from graft.base.errors import UsageError
from graft.cli.app import app
from graft.workbench.autofuse import AutofuseRequest, CandidateOutcome, Ledger, autofuse, read_budget
from graft.workbench.autofuse.alone import ComparedCalls
from graft.workbench.autofuse.cases import EXTREMES, plain_cases
from graft.workbench.autofuse.engines import candidates_of
from graft.workbench.autofuse.ledger import FILE, on_machine, open_ledger
from graft.workbench.autofuse.process import run_trial
from graft.workbench.autofuse.request import check_request
from graft.workbench.autofuse.table import table_text
from graft.workbench.autofuse.timing import ShapeTimes, verdict
from graft.workbench.autofuse.trial import Findings, TrialOrder, main, review
from graft.workbench.autofuse.writing import write_trial
from graft.workbench.scaffold.candidate import seed_of
from graft.workbench.scaffold.destination import Destination
from marks import FULL
from processes import Forked
from row_cases import GATED, RowPattern, fresh, loaded, write

OFF = tuple(f"transforms.{name}.enabled=false" for name in ("fuse_rms_norm", "fuse_swiglu", "fuse_rope"))


def shape(before: list[float], after: list[float], name: str = "decode") -> ShapeTimes:
    return ShapeTimes(name, tuple(before), tuple(after))


def outcome(name: str = "a", status: str = "kept") -> CandidateOutcome:
    times = (shape([2.0, 2.1, 2.2], [1.0, 1.1, 1.2]), shape([5.0, 5.0, 5.0], [4.0, 4.0, 4.1], "prefill"))
    return CandidateOutcome(
        name, "relu → mul", "gemm_epilogue", 2, (3.0, 4.0), (0.1, 0.2), status, "because a|b", "fuse_a",
        "triton_fallback_path", ("native",), times, ({"check": "tests", "verdict": "pass", "reason": "3"},), 1.5,
    )  # fmt: skip


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400)])
def test_budgets(text, seconds):
    assert read_budget(text) == seconds


@pytest.mark.parametrize("text", ["0", "0m", "", "ten", "-5m", "10d", "nan"])
def test_a_budget_of_nothing_is_refused(text):
    with pytest.raises(UsageError, match="--budget"):
        read_budget(text)


@pytest.mark.parametrize("change", [{"steps": 0}, {"repeats": 2}, {"gain": 0.0}, {"gain": 1.5}, {"limit": 0}])
def test_bad_requests(change):
    with pytest.raises(UsageError, match=f"--{next(iter(change))}"):
        check_request(replace(AutofuseRequest("tiny-llama", Path("x")), **change))


def test_only_what_pays_is_kept():
    steady = [10.0, 10.1, 9.9, 10.0, 10.2]
    faster, same = [t * 0.9 for t in steady], list(steady)
    assert verdict([shape(steady, faster), shape(steady, same, "prefill")], 0.02)[0]
    assert not verdict([shape(steady, same), shape(steady, same, "prefill")], 0.02)[0]
    assert not verdict([shape(steady, [t * 0.985 for t in steady])], 0.02)[0]  # less than two per cent
    for lost in (shape([-0.1, -0.2, -0.1], [0.1, 0.1, 0.2]), shape([0.0, 0.1], [0.1, 0.1])):
        assert verdict([lost], 0.02) == (False, "decode steps are shorter than the noise of their times")
    pays, told = verdict([shape(steady, faster), shape(faster, steady, "prefill")], 0.02)
    assert not pays and "a prefill step gets slower" in told


def test_a_saving_within_the_noise_is_none():
    before = [10.0, 14.0, 9.0, 15.0, 10.0]
    after = [13.0, 9.0, 14.0, 10.0, 9.6]
    times = shape(before, after)
    assert times.saving > 0.02 and times.noise > times.saving
    assert not verdict([times], 0.02)[0]


def test_outcomes_are_kept_between_runs(tmp_path):
    kind = AutofuseRequest("tiny-llama", tmp_path).kind()
    ledger = Ledger(kind, (outcome(), outcome("b", "not tried")), {"model": "tiny-llama"})
    ledger.save(tmp_path)
    again = open_ledger(tmp_path, kind)
    assert again == ledger and again.find("a").decided and not again.find("b").decided
    assert len(again.having(outcome("b", "no gain")).outcomes) == 2
    assert "because a\\|b" in table_text(again) and "+50.0%" not in table_text(Ledger(kind))


def test_times_of_another_machine_are_not_gone_on_with(tmp_path):
    """Old times under the name of a new machine would be a lie, and what they kept might not pay here."""
    kind = AutofuseRequest("tiny-llama", tmp_path).kind()
    here = {"device_name": "CPU, 2 threads", "torch": "2.13", "date": "today"}
    there = here | {"device_name": "NVIDIA H200", "date": "yesterday"}
    measured = Ledger(kind, (outcome(),), there)
    with pytest.raises(UsageError, match="device_name = 'NVIDIA H200', and here it is 'CPU, 2 threads'"):
        on_machine(measured, tmp_path, here)
    assert on_machine(measured, tmp_path, there | {"date": "today"}).facts == there
    assert on_machine(Ledger(kind, (), there), tmp_path, here).facts == here  # nothing was measured yet


def test_a_package_of_another_run_is_left_alone(tmp_path):
    kind = AutofuseRequest("tiny-llama", tmp_path).kind()
    Ledger(kind).save(tmp_path)
    with pytest.raises(UsageError, match="model = 'tiny-llama', not 'tiny-qwen3'"):
        open_ledger(tmp_path, kind | {"model": "tiny-qwen3"})
    (tmp_path / FILE).write_text('{"format": 1}')
    with pytest.raises(UsageError, match="cannot be read"):
        open_ledger(tmp_path, kind)
    (tmp_path / FILE).write_text(json.dumps({"format": 99, "request": kind, "candidates": []}))
    with pytest.raises(UsageError, match="format 99"):
        open_ledger(tmp_path, kind)
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("not graft's")
    with pytest.raises(UsageError, match="not made by graft autofuse"):
        open_ledger(other, kind)


# ── trials ──────────────────────────────────────────────────────────────────────────────────────────────────────


def order(folder: Path, tests: str) -> TrialOrder:
    """Of a package whose test file is this text."""
    pattern = fresh(GATED)
    place = Destination.in_package(folder / "trial-package")
    write(pattern, place.root)
    test = place.test(f"fuse_{pattern.name}")
    test.write_text(tests)
    return TrialOrder(
        "tiny-llama", f"fuse_{pattern.name}", pattern.name, pattern.shapes, (str(place.source),), str(test),
        str(folder / "note.md"), "cpu", "eager", "float32", None, OFF, (), 16, 2, 3, False,
    )  # fmt: skip


def forked(command, *, env, stdout, **_):
    return Forked(*command[2:], env=env, stdout=stdout, stderr=stdout)  # less the interpreter and -P


HANGS = "import time\ndef test_it():\n    time.sleep(600)\n"
CRASHES = "import os, signal\ndef test_it():\n    os.kill(os.getpid(), signal.SIGSEGV)\n"
FAILS = "def test_it():\n    assert 1 == 2, 'the kernel is wrong'\n"


@pytest.mark.parametrize(
    ("tests", "limit", "failure"),
    [
        (CRASHES, 300.0, "crashed (SIGSEGV) in its part 'tests'"),
        pytest.param(HANGS, 30.0, "took longer than 30 s in its part", marks=pytest.mark.exhaustive),
        pytest.param(FAILS, 300.0, "tests: test_it: ", marks=pytest.mark.exhaustive),
    ],
)
def test_what_a_kernel_does_ends_in_its_own_process(tests, limit, failure, tmp_path, monkeypatch):
    if not FULL:  # from a process that has torch, whose import takes most of the time
        processes = SimpleNamespace(Popen=forked, DEVNULL=None, STDOUT=None)
        monkeypatch.setattr("graft.workbench.autofuse.process.subprocess", processes)
    asked = order(tmp_path, tests)
    found = run_trial(asked, [Path(asked.packages[0]).parent], limit)
    assert failure in found["failure"] and found["times"] == []


def test_a_review_is_of_the_transforms_that_run_on_the_device(tmp_path, monkeypatch):
    """Those for a GPU, tried on a CPU as `graft check` does, left no `silu → mul` and no norm before a GEMM."""
    asked = []

    def stop(model, request):
        asked.append(request.other_devices)
        raise UsageError("far enough")

    monkeypatch.setattr("graft.workbench.check.check", stop)
    given = replace(order(tmp_path, ""), transform="fuse_rope", packages=())
    for device in ("cpu", "cuda:0"):
        with pytest.raises(UsageError, match="far enough"):
            review(replace(given, device=device), Findings(tmp_path / "found.json"))
    assert asked == [False, True]


def test_rows_beyond_every_number_that_stands_for_an_infinity_are_tried():
    """Below and above, of a length with a tail; where float32 does not hold what is computed there, nothing is."""
    rows = [case for case in plain_cases({"x": "a b c"}, ((1, 13),)) if "beyond" in case.name]
    assert [float(case.tensors[0].abs().min()) >= scale for case, scale in zip(rows, EXTREMES, strict=True)]
    for case in rows:
        mixed, below, above = case.tensors[0][0]
        assert below.max() < 0 < above.min() and mixed.min() < 0 < mixed.max() and len(mixed) % 16
    held = [ComparedCalls(lambda x: x - x.amax(-1, keepdim=True)).applies(case) for case in rows]
    squared = [ComparedCalls(lambda x: x / x.pow(2).sum(-1, keepdim=True).sqrt()).applies(case) for case in rows]
    assert held == [True] * 3 and squared == [True, True, False]
    # 1 + tanh(-30) is 0 in float32: a right kernel is as far off there as the model
    gelu = ComparedCalls(partial(torch.nn.functional.gelu, approximate="tanh"))
    some = {case.name.rpartition(" ")[2]: gelu.applies(case) for case in plain_cases({"x": "a b 16"}, ((1, 13),))}
    assert some["1"] and some["0.001"] and not some["30"]
    assert ComparedCalls(torch.relu).unseen() == "no call was compared"


def test_without_a_compiler_a_kernel_is_not_tried_and_the_reason_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("graft.workbench.autofuse.triton_kernels.triton_kernel_problem", lambda *_: ("", 1))
    asked = order(tmp_path, "def test_it():\n    pass\n")
    (tmp_path / "trial.json").write_text(asked.text())
    with loaded(tmp_path / "trial-package", RowPattern(asked.op, "", {})):
        main(str(tmp_path / "trial.json"), str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["phase"] == "failed" and found["failure"].startswith("kernels: ")
    assert "no-such-compiler" in found["failure"] and not found["times"]


@pytest.mark.exhaustive
def test_a_whole_run_and_one_that_goes_on(tmp_path):
    """The first candidate is tried and decided, the others wait; the second run takes the next one."""
    request = AutofuseRequest(
        "tiny-llama", tmp_path / "tiny-fusions", None, 1, "cpu", "native", "float32", sets=OFF, own=True, prompt=16,
        new=4, repeats=3,
    )  # fmt: skip
    first = autofuse(request)
    tried = [one for one in first.outcomes if one.decided]
    assert len(tried) == 1 and tried[0].status in ("kept", "no gain") and len(tried[0].times) == 2
    assert {line["check"] for line in tried[0].checks} >= {"tests", "numerics", "native kernel", "same answers"}
    second = autofuse(request)
    assert [one.id for one in second.outcomes] == [one.id for one in first.outcomes]
    assert second.outcomes[0] == first.outcomes[0] and sum(one.decided for one in second.outcomes) == 2
    kept = [one.transform for one in second.kept]
    assert all((tmp_path / "tiny-fusions/src/tiny_fusions" / f"{name}.py").is_file() for name in kept)


@pytest.mark.exhaustive
def test_the_command_prints_one_document(tmp_path):
    words = ["autofuse", "tiny-llama", "--steps", "1", "-o", str(tmp_path / "made"), "--device", "cpu", "--json"]
    done = CliRunner().invoke(app, words)
    told = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == 0 and told["schema"] == "autofuse/1" and told["package"] == str(tmp_path / "made")


@pytest.mark.exhaustive
def test_the_three_novel_blocks_of_the_example_are_candidates(tmp_path, monkeypatch):
    """The cubed ReLU, the gated residual with the norm behind it, the scaled norm: each gets kernels of its own."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    write_model = importlib.import_module("novel_blocks").write_model
    write_model(tmp_path / "novel", hidden=32, layers=2)
    request = AutofuseRequest(
        str(tmp_path / "novel"), tmp_path / "out", dtype="float32", device="cpu", trust_remote_code=True
    )
    found = candidates_of(request)
    titles = {one.title: one for one in found.worthwhile}
    assert "relu → pow → mul" in titles and len([t for t in titles if "sigmoid" in t and "mean" in t]) >= 2
    for number, candidate in enumerate(found.worthwhile):
        place = Destination.in_package(tmp_path / f"novel-trial-{number}")
        written, path, _ = write_trial(
            f"fuse_{candidate.function_name}", seed_of(candidate, "novel"), place, own=True
        )
        assert path == "triton_fallback_path" and not written.no_kernel
        assert any(file.name == "native.h" for file in written.files)
