"""What a check says: one line for each point of the list, and the whole of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from graft.workbench.check.baseline import BaselineChange
from graft.workbench.check.bisect import Bisection
from graft.workbench.check.line import CheckLine, Verdict
from graft.workbench.check.tests_run import TestsRun


@dataclass(frozen=True)
class TransformCheck:
    """The list for one transform. summary: its `[SUMMARY]` line."""

    name: str
    lines: tuple[CheckLine, ...]
    summary: str = ""
    matches: int = 0
    tests: TestsRun | None = None  # where they were run

    @property
    def verdict(self) -> Verdict:
        found = {line.verdict for line in self.lines}
        return "fail" if "fail" in found else "pass"

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(line.verdict for line in self.lines)
        return {verdict: found[verdict] for verdict in ("pass", "fail", "skip")}

    def of(self, check: str) -> CheckLine:
        return next(line for line in self.lines if line.check == check)


@dataclass(frozen=True)
class CheckReport:
    """One model. whole: what holds for the run and not for one transform. changes: against the baseline."""

    model: str
    dtype: str
    device: str
    checks: tuple[TransformCheck, ...]
    whole: tuple[CheckLine, ...] = ()
    baseline: str = ""
    changes: tuple[BaselineChange, ...] = ()
    bisection: Bisection | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def failures(self) -> tuple[str, ...]:
        """Every reason to say no, in words."""
        lines = [(check.name, line) for check in self.checks for line in check.lines]
        lines += [("the run", line) for line in self.whole]
        said = [f"{name}: {line.check}: {line.reason}" for name, line in lines if line.verdict == "fail"]
        return (*said, *(f"{c.transform}: {', '.join(c.kinds)}: {c.reason}" for c in self.changes if c.bad))

    @property
    def ok(self) -> bool:
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "ok": self.ok,
            "failures": list(self.failures),
            "transforms": [
                {
                    "name": c.name,
                    "verdict": c.verdict,
                    "summary": c.summary,
                    "matches": c.matches,
                    "lines": [asdict(n) for n in c.lines],
                    "tests": c.tests.to_dict() if c.tests else None,
                }
                for c in self.checks
            ],
            "whole": [asdict(line) for line in self.whole],
            "baseline": self.baseline,
            "changes": [plain(asdict(change)) | {"bad": change.bad} for change in self.changes],
            "bisection": plain(asdict(self.bisection)) if self.bisection else None,
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
            "versions": dict(self.versions),
        }


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: it becomes text."""
    return {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}
