"""The tests of a transform, run: what passed, what did not, as pytest counted it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import graft
from graft.workbench.check.line import CheckLine

LIMIT = 900.0  # seconds for all of them


@dataclass(frozen=True)
class TestsRun:
    """files: what was run. problem: why there are no counts."""

    files: tuple[str, ...]
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    failures: tuple[str, ...] = field(default=())
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem and not self.failed and self.passed > 0

    @property
    def counts(self) -> str:
        found = (("passed", self.passed), ("failed", self.failed), ("skipped", self.skipped))
        return ", ".join(f"{count} {name}" for name, count in found if count) or "no test"

    def line(self) -> CheckLine:
        where = ", ".join(Path(file).name for file in self.files)
        if self.problem:
            return CheckLine("tests as run", "fail", f"{where}: {self.problem}")
        first = f"; first: {self.failures[0]}" if self.failures else ""
        return CheckLine("tests as run", "pass" if self.ok else "fail", f"{where}: {self.counts}{first}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}


def run_tests(files: list[Path], root: Path, limit: float = LIMIT) -> TestsRun:
    """In a process of its own, from the folder that they belong to."""
    named = tuple(map(str, files))
    if not files:
        return TestsRun((), problem="no file is about this transform alone")
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "junit.xml"
        source = str(Path(graft.__file__).parent.parent)
        paths = (source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={found}", *named]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        try:
            done = subprocess.run(
                command, cwd=root, env=environment, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return TestsRun(named, problem=f"took longer than {limit:.0f} s and was ended")
        if not found.is_file():
            said = " ".join((done.stderr or done.stdout).split())[-200:]
            return TestsRun(named, problem=f"pytest ended with {done.returncode}: {said}")
        counted = counted_tests(ET.parse(found).getroot(), named)
        if done.returncode not in (0, 1) or (done.returncode and not counted.failed):  # it did not come to its end
            return replace(counted, problem=f"pytest ended with {done.returncode}, after {counted.counts}")
        return counted


def counted_tests(root: ET.Element, files: tuple[str, ...]) -> TestsRun:
    cases = list(root.iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    seconds = sum(float(case.get("time") or 0) for case in cases)
    failures = tuple(f"{case.get('name')}: {reason(case)}" for case in bad)
    return TestsRun(files, len(cases) - len(bad) - skipped, len(bad), skipped, round(seconds, 2), failures)


def reason(case: ET.Element) -> str:
    found = case.find("failure")
    said = found if found is not None else case.find("error")
    return " ".join((said.get("message") or "").split())[:200] if said is not None else ""
