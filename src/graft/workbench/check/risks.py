"""What a reviewer should still think about: whatever the run left open, each with its number."""

from __future__ import annotations

from collections.abc import Iterator

from graft.models.registry import families
from graft.passes.registry import TransformRegistry
from graft.passes.report import TransformRecord
from graft.workbench.check.results import CheckReport
from graft.workbench.check.trial import CheckTrial
from graft.workbench.diff_runs import folded, miss_text

CLOSE = 0.5  # of what a numeric check allows: more than that is worth a look


def open_risks(record: TransformRecord, report: CheckReport, trial: CheckTrial) -> list[str]:
    found = [
        *(f"fails: {text}" for text in report.failures),
        *(
            f"not checked: {line.check}: {line.reason}"
            for c in report.checks
            for line in c.lines
            if line.verdict == "skip"
        ),
        *(f"not checked: {line.check}: {line.reason}" for line in report.whole if line.verdict == "skip"),
        *missed(record),
        *close(record),
        *uncovered(record),
        *elsewhere(record.name, trial),
        *report.notes,
    ]
    if not trial.run.manifest.device.startswith("cuda"):
        found.append(
            "no kernel ran on a GPU: numbers are those of the references on this device, times are estimates"
        )
    return [f"- {text}" for text in found]


def missed(record: TransformRecord) -> Iterator[str]:
    misses = folded(miss_text(miss) for miss in record.near_misses)
    if misses:
        yield f"{len(record.near_misses)} near misses were left alone: {'; '.join(misses[:3])}"


def close(record: TransformRecord) -> Iterator[str]:
    checks = [match.numeric_check for match in record.matches if match.numeric_check is not None]
    worst = max(checks, key=lambda check: check.share, default=None)
    if worst is not None and worst.share > CLOSE:
        yield f"a match uses {worst.share:.0%} of what its dtype allows ({worst.inputs} inputs)"


def uncovered(record: TransformRecord) -> Iterator[str]:
    """What the numeric checks left out: dtypes, sizes, values."""
    checks = [match.numeric_check for match in record.matches if match.numeric_check is not None]
    yield from dict.fromkeys(f"not checked numerically: {text}" for check in checks for text in check.uncovered)


def elsewhere(name: str, trial: CheckTrial) -> Iterator[str]:
    """Families that count this transform and were not looked at."""
    own = trial.family.name if trial.family else ""
    others = [f.name for f in families().values() if name in {*f.expect, *f.expect_gpu} and f.name != own]
    if others:
        yield f"one family was looked at; it also matches {', '.join(others)} (graft check {name} --all-models)"
    if TransformRegistry.get(name).uncheckable:
        yield "its matches cannot be checked one by one; the results of the whole model stand for them"
