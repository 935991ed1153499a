"""This run against one that was saved: what became of each transform's matches, metadata and numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from graft.errors import BaselineMismatch
from graft.transforms.dumps import WEIGHTS
from graft.transforms.report import TransformRecord
from graft.workbench.check.graphs import metadata_problems
from graft.workbench.check.outputs import Outputs, distance, stored_outputs
from graft.workbench.diff_runs import TransformDiff, compare_records
from graft.workbench.runs import Run, open_run

ChangeKind = Literal[
    "match loss",
    "match gain",
    "metadata loss",
    "numeric drift acceptable",
    "numeric drift not acceptable",
    "unchanged",
]
BAD = ("match loss", "metadata loss", "numeric drift not acceptable")


@dataclass(frozen=True)
class Change:
    """One transform. drift: how far its results are from those of the baseline; None where it was not measured."""

    transform: str
    kinds: tuple[ChangeKind, ...]
    reason: str = ""
    drift: float | None = None

    @property
    def bad(self) -> bool:
        return any(kind in BAD for kind in self.kinds)


@dataclass(frozen=True)
class Baseline:
    run: Run
    outputs: Outputs


def open_baseline(folder: str | Path) -> Baseline:
    """Its results as they were computed when it was saved; else its graphs are run again, where it has weights."""
    run = open_run(folder)
    stored = stored_outputs(run.folder)
    state = run.state() if not stored and (run.folder / WEIGHTS).is_file() else {}
    return Baseline(run, Outputs(run, state, stored))


def check_same_model(baseline: Run, model: str, dtype: str) -> None:
    """Another model, or the same one in another dtype, has nothing that could be compared."""
    kept = baseline.manifest
    if (kept.model, kept.dtype) != (model, dtype):
        raise BaselineMismatch(str(baseline.folder), f"{kept.model} in {kept.dtype}", f"{model} in {dtype}")


def compare(run: Run, outputs: Outputs, baseline: Baseline, names: list[str], allowed: float) -> list[Change]:
    """One change for each of `names`, in the order they ran."""
    return [compare_one(run, outputs, baseline, name, allowed) for name in names]


def compare_one(run: Run, outputs: Outputs, baseline: Baseline, name: str, allowed: float) -> Change:
    old, new = baseline.run.report.transforms.get(name), run.report.transforms.get(name)
    kinds: list[ChangeKind] = []
    reasons: list[str] = []
    for kind, reason in (
        *match_changes(compare_records(name, old, new)),
        *metadata_changes(baseline.run, run, name, old, new),
    ):
        kinds.append(kind)
        reasons.append(reason)
    drift = None
    if not outputs.problem and not baseline.outputs.problem:
        drift, found = drift_of(outputs, baseline.outputs, name, allowed)
        for kind, reason in found:
            kinds.append(kind)
            reasons.append(reason)
    return Change(name, tuple(kinds) or ("unchanged",), "; ".join(reasons), drift)


def match_changes(diff: TransformDiff) -> Iterator[tuple[ChangeKind, str]]:
    counts = f"{diff.matches[0]} → {diff.matches[1]}"
    status = f", {diff.status[0]} → {diff.status[1]}" if diff.status[0] != diff.status[1] else ""
    misses = f"; now: {diff.new_misses[0]}" if diff.new_misses else ""
    if diff.lost:
        yield "match loss", f"matches {counts}{status}: not any more at {', '.join(diff.lost)}{misses}"
    if diff.gained:
        yield "match gain", f"matches {counts}{status}: new at {', '.join(diff.gained)}"


def metadata_changes(
    before: Run, after: Run, name: str, old: TransformRecord | None, new: TransformRecord | None
) -> Iterator[tuple[ChangeKind, str]]:
    now = metadata_problems(after, name) if new and new.matches else []
    was = metadata_problems(before, name) if old and old.matches else []
    if len(now) > len(was):
        added = [problem for problem in now if problem not in was] or now
        yield "metadata loss", f"{len(now) - len(was)} more than before: {added[0]}"


def drift_of(
    outputs: Outputs, baseline: Outputs, name: str, allowed: float
) -> tuple[float | None, list[tuple[ChangeKind, str]]]:
    """How far the results after this transform are from the baseline's, and whether that is its own doing.

    Results that were off before it already are not held against it, unless it moves them itself by more than is
    allowed and did not in the baseline.
    """
    here, there = place(outputs, name), place(baseline, name)
    if here is None or there is None:
        return None, []
    drift = distance(outputs.after(here), baseline.after(there))
    if drift == 0:
        return 0.0, []
    inherited = distance(outputs.after(here - 1), baseline.after(there - 1))
    own = distance(outputs.after(here), outputs.after(here - 1))
    own_before = distance(baseline.after(there), baseline.after(there - 1))
    moved = own > allowed >= own_before
    text = f"results are off by {drift:.1e} of the largest, {allowed:.1e} is allowed"
    if inherited == 0 or moved:
        kind: ChangeKind = "numeric drift not acceptable" if drift > allowed or moved else "numeric drift acceptable"
        return drift, [(kind, text)]
    if drift > allowed >= inherited:
        return drift, [("numeric drift not acceptable", f"{text}; {inherited:.1e} of it came from before")]
    return drift, []


def place(outputs: Outputs, name: str) -> int | None:
    """The number of a transform's step; None where it was off."""
    return next((step.number for step in outputs.run.steps[1:] if step.transform == name), None)
