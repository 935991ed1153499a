"""One fusion on trial, in a process of its own: its tests, the review list, its kernels, an engine with and without.

    python -m graft.workbench.autofuse.trial TRIAL.json RESULT.json

What it finds is written after every part, so that a process that is killed leaves what it knew and where it was.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graft.base.errors import GraftError, NothingNative
from graft.base.files import write_whole
from graft.base.plugins import load_named

if TYPE_CHECKING:
    from graft.engine.llm import LLM


@dataclass(frozen=True)
class TrialOrder:
    """What to try. packages: folders of packages that are loaded, the new one last; note: where to write one."""

    model: str
    transform: str
    op: str
    shapes: dict[str, str]
    packages: tuple[str, ...]
    tests: str
    note: str
    device: str
    backend: str
    dtype: str
    config: str | None
    sets: tuple[str, ...]
    plugins: tuple[str, ...]
    prompt: int
    new: int
    repeats: int
    trust_remote_code: bool

    @staticmethod
    def read(path: Path) -> TrialOrder:
        data: dict[str, Any] = json.loads(path.read_text())
        lists: dict[str, Any] = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
        return TrialOrder(**{**data, **lists})

    def text(self) -> str:
        return json.dumps(asdict(self))

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


class Wrong(Exception):
    """A check that failed, in words."""


class NothingLeft(Exception):
    """What was kept before it takes all its sites."""


class Findings:
    """What is known so far, on disk after every line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = {"phase": "imports", "checks": [], "times": [], "failure": "", "kernels": []}
        self.save()

    def begin(self, phase: str) -> None:
        self.data["phase"] = phase
        self.save()

    def line(self, check: str, verdict: str, reason: str) -> None:
        self.data["checks"].append({"check": check, "verdict": verdict, "reason": reason})
        self.save()
        if verdict == "fail":
            raise Wrong(f"{check}: {reason}")

    def save(self) -> None:
        write_whole(self.path, json.dumps(self.data))


def main(order_file: str, result_file: str) -> None:
    findings = Findings(Path(result_file))
    order = TrialOrder.read(Path(order_file))
    try:
        try_out(order, findings)
        findings.begin("done")
    except Wrong as wrong:
        findings.data |= {"failure": str(wrong), "phase": "wrong"}
    except NothingLeft as reason:
        findings.data |= {"failure": str(reason), "phase": "nothing left"}
    except GraftError as error:
        findings.data |= {"failure": f"{findings.data['phase']}: {error}", "phase": "failed"}
    findings.save()


def try_out(order: TrialOrder, findings: Findings) -> None:
    check_alone(order, findings)
    measure(order, findings, check_in_model(order, findings))


def check_alone(order: TrialOrder, findings: Findings) -> None:
    """What needs no model, what is cheap first."""
    findings.begin("kernels")
    for name in plugin_names(order)[:-1]:  # its place in the pipeline is ahead of theirs
        load_named(name)
    importlib.import_module(f"{Path(order.packages[-1]).name}.{order.transform}")  # registers the op
    check_kernels(order, findings)
    findings.begin("tests")
    run_tests(order, findings)


def check_in_model(order: TrialOrder, findings: Findings) -> tuple[LLM, LLM]:
    """The engines without the fusion and with it."""
    findings.begin("review list")
    review(order, findings)
    findings.begin("engines")
    return compare_engines(order, findings)


def run_tests(order: TrialOrder, findings: Findings) -> None:
    """The generated ones: where it fuses and where not, metadata, numbers, and the Triton kernel, which without a GPU
    runs in the interpreter."""
    import pytest

    counts = Counting()
    # what is printed belongs to nobody: standard output is the program's
    with Path(os.devnull).open("w") as nowhere:
        kept, sys.stdout = sys.stdout, nowhere
        try:
            arguments = [
                "-q",
                "-x",
                "--no-header",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                "--tb=no",
                order.tests,
            ]
            code = pytest.main(arguments, plugins=[counts])
        finally:
            sys.stdout = kept
    findings.data["tests"] = {"passed": counts.passed, "skipped": counts.skipped, "failed": counts.failed}
    if code != 0 or not counts.passed:
        findings.line("tests", "fail", counts.first or f"pytest ended with {int(code)}")
    findings.line("tests", "pass", f"{counts.passed} passed, {counts.skipped} skipped")


class Counting:
    """A plugin of pytest's that counts, and keeps the first failure."""

    def __init__(self) -> None:
        self.passed, self.skipped, self.failed, self.first = 0, 0, 0, ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed += 1
            crash = getattr(report.longrepr, "reprcrash", None)
            said = str(getattr(crash, "message", report.longrepr)).strip()
            self.first = self.first or f"{report.nodeid.rpartition('::')[2]}: {' '.join(said.split())[:300]}"
        elif report.skipped:
            self.skipped += 1
        elif report.when == "call":
            self.passed += 1

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed += 1
            self.first = self.first or f"cannot be collected: {' '.join(str(report.longrepr).split())[-300:]}"


def plugin_names(order: TrialOrder) -> tuple[str, ...]:
    return (*order.plugins, *(Path(folder).name for folder in order.packages))


def review(order: TrialOrder, findings: Findings) -> None:
    """`graft check`, with the note. On a CPU without transforms that are for a GPU, which would take its sites."""
    from graft.passes.config import load_config
    from graft.workbench.check import CheckRequest, check

    settings = load_config(order.config, sets=order.sets, plugins=plugin_names(order))
    request = CheckRequest(
        settings, order.transform, order.dtype, tests=Path(order.tests).parent, note=Path(order.note),
        trust_remote_code=order.trust_remote_code, other_devices=order.on_gpu,
    )  # fmt: skip
    report = check(order.model, request)
    (checked,) = report.checks
    if not checked.matches and len(order.packages) > 1:
        raise NothingLeft(f"what was kept before it takes its sites: {checked.of('numerics').reason}")
    for line in (*checked.lines, *report.whole):
        findings.line(line.check, line.verdict, line.reason)
    if not checked.matches:
        findings.line("reviewed matches", "fail", f"none, so nothing was compared: {checked.of('numerics').reason}")


def check_kernels(order: TrialOrder, findings: Findings) -> None:
    """Each by itself, beside float64."""
    from graft.workbench.autofuse.kernels import native_kernel_problem
    from graft.workbench.autofuse.triton_kernels import triton_kernel_problem

    existing = "" if order.op else "it calls a kernel that exists"
    why = existing or missing(order, "triton.py") or ("" if find_spec("triton") else "triton is not installed")
    one_kernel("triton kernel", why, findings, lambda: triton_kernel_problem(order.op, order.shapes, order.device))
    why = existing or ("for a CPU" if order.on_gpu else missing(order, "native.h"))
    one_kernel("native kernel", why, findings, lambda: native_kernel_problem(order.op, order.shapes))


def one_kernel(name: str, skipped: str, findings: Findings, problem_of: Callable[[], tuple[str, int]]) -> None:
    from graft.workbench.autofuse.cases import NotOneShape

    if skipped:
        findings.line(name, "skip", skipped)
        return
    try:
        problem, calls = problem_of()
    except (NotOneShape, NothingNative) as why:
        findings.line(name, "skip", f"not run by itself: {why}")
        return
    findings.line(name, "fail" if problem else "pass", problem or f"{calls} calls against float64")


def missing(order: TrialOrder, file: str) -> str:
    """'' where the op has that file."""
    return "" if (Path(order.packages[-1]) / "ops" / order.op / file).is_file() else "there is none"


def compare_engines(order: TrialOrder, findings: Findings) -> tuple[LLM, LLM]:
    from graft.workbench.autofuse.answers import differences
    from graft.workbench.autofuse.engines import make_engine

    before = make_engine(order, plugin_names(order), on=False)
    after = make_engine(order, plugin_names(order), on=True)
    findings.data["backend"] = after.backend
    record = after.report.transforms[order.transform]
    matches = f"{len(record.matches)} in the engine's graph"
    findings.line(
        "engine matches", "pass" if record.matches else "fail", matches if record.matches else record.reason
    )
    if order.op:
        findings.data["kernels"] = [str(after.report.kernels.get(f"graft::{order.op}", "not in the graph"))]
    problem, told = differences(before, after, order.prompt)
    findings.line("same answers", "fail" if problem else "pass", problem or told)
    return before, after


def measure(order: TrialOrder, findings: Findings, engines: tuple[LLM, LLM]) -> None:
    """In turns, by the clock."""
    from graft.workbench.autofuse.timing import alternate

    findings.begin("measurement")
    times = alternate(*engines, order.prompt, order.new, order.repeats)
    findings.data["times"] = [one.to_dict() for one in times]


if __name__ == "__main__":
    main(*sys.argv[1:])
