"""This run against one that was saved: what became of each transform's matches, metadata and numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from graft.base.errors import BaselineMismatch
from graft.passes.dumps import WEIGHTS
from graft.passes.report import TransformRecord
from graft.workbench.check.graphs import metadata_problems
from graft.workbench.check.outputs import StepLogits, distance, kind_text, off_text, stored_outputs
from graft.workbench.check.steps import StepGraphs
from graft.workbench.diff_runs import TransformDiff, compare_records, manifest_changes
from graft.workbench.runs import StoredRun, open_run

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
class BaselineChange:
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
    graphs: StepGraphs
    outputs: StepLogits

    @property
    def run(self) -> StoredRun:
        return self.graphs.run


def open_baseline(folder: str | Path) -> Baseline:
    """Its results as they were computed when it was saved; else its graphs are run again, where it has weights."""
    run = open_run(folder)
    stored = stored_outputs(run.folder)
    state = run.state() if not stored and (run.folder / WEIGHTS).is_file() else {}
    return Baseline(StepGraphs(run), StepLogits(run, state, stored))


def check_same_model(baseline: StoredRun, model: str, dtype: str) -> None:
    """Another model, or the same one in another dtype, has nothing that could be compared."""
    kept = baseline.manifest
    if (kept.model, kept.dtype) != (model, dtype):
        raise BaselineMismatch(str(baseline.folder), f"{kept.model} in {kept.dtype}", f"{model} in {dtype}")


def numbers_notes(outputs: StepLogits, baseline: Baseline) -> list[str]:
    """What the comparison of numbers cannot say of a transform: that there is none, or that they were off before.

    Captured results of another shape are those of another model, whatever its name.
    """
    if problem := outputs.problem or baseline.outputs.problem:
        return [f"numbers were not compared: {problem}"]
    now, then = outputs.after(0), baseline.outputs.after(0)
    if kind_text(now) != kind_text(then):
        model, folder = baseline.run.manifest.model, str(baseline.run.folder)
        raise BaselineMismatch(folder, *(f"{model} with results {kind_text(found)}" for found in (then, now)))
    if distance(now, then) == 0:
        return []
    return [
        f"since the baseline the captured graph's own results: {off_text(now, then)}; no transform is named for that"
    ]


def with_lost(names: list[str], baseline: Baseline) -> list[str]:
    """Also those that matched in the baseline and are off now, or gone; in its order, so that causes come first."""
    records = baseline.run.report.transforms
    lost = [name for name, record in records.items() if record.matches and name not in names]
    order = {name: index for index, name in enumerate(records)}
    return sorted([*names, *lost], key=lambda name: order.get(name, len(order)))


def other_makings(baseline: Baseline, run: StoredRun) -> list[str]:
    """What this run was made of that the baseline was not: versions, options; not what a check sets by itself."""
    details = manifest_changes(baseline.run, run)
    told = [d for d in details if not d.what.endswith((".on_error", ".devices")) and d.what != "verify"]
    return [f"since the baseline {d.what}: {d.before} → {d.after}" for d in told]


def compare(graphs: StepGraphs, outputs: StepLogits, baseline: Baseline, name: str, allowed: float) -> BaselineChange:
    """What became of one transform."""
    old, new = baseline.run.report.transforms.get(name), graphs.run.report.transforms.get(name)
    kinds: list[ChangeKind] = []
    reasons: list[str] = []
    for kind, reason in (
        *match_changes(compare_records(name, old, new), old, new),
        *metadata_changes(baseline.graphs, graphs, name, old, new),
    ):
        kinds.append(kind)
        reasons.append(reason)
    drift = None
    if not outputs.problem and not baseline.outputs.problem:
        drift, found = drift_of(outputs, baseline.outputs, name, allowed)
        for kind, reason in found:
            kinds.append(kind)
            reasons.append(reason)
    return BaselineChange(name, tuple(kinds) or ("unchanged",), "; ".join(reasons), drift)


def match_changes(
    diff: TransformDiff, old: TransformRecord | None, new: TransformRecord | None
) -> Iterator[tuple[ChangeKind, str]]:
    """A match that is elsewhere now was lost at one site and gained at another."""
    counts = f"{diff.matches[0]} → {diff.matches[1]}"
    status = f", {diff.status[0]} → {diff.status[1]}" if diff.status[0] != diff.status[1] else ""
    if diff.lost:
        text = f"matches {counts}{status}: not any more at {', '.join(diff.lost)}"
        yield "match loss", text + (f"; {reason}" if (reason := why_lost(old, new)) else "")
    if diff.gained:
        yield "match gain", f"matches {counts}{status}: new at {', '.join(diff.gained)}"


def why_lost(old: TransformRecord | None, new: TransformRecord | None) -> str:
    """What stopped the match that came nearest at a site that was lost, or what the transform says as a whole."""
    if old is None or new is None:
        return ""
    lost = {match.module for match in old.matches} - {match.module for match in new.matches}
    misses = [miss for miss in new.near_misses if miss.module in lost]
    closest = max(misses, key=lambda miss: miss.matched / max(miss.size, 1), default=None)
    return closest.reason if closest else new.reason


def metadata_changes(
    before: StepGraphs, after: StepGraphs, name: str, old: TransformRecord | None, new: TransformRecord | None
) -> Iterator[tuple[ChangeKind, str]]:
    now = metadata_problems(after, name) if new and new.matches else []
    was = metadata_problems(before, name) if now and old and old.matches else []
    if len(now) > len(was):
        added = [problem for problem in now if problem not in was] or now
        yield "metadata loss", f"{len(now) - len(was)} more than before: {added[0]}"


def drift_of(
    outputs: StepLogits, baseline: StepLogits, name: str, allowed: float
) -> tuple[float | None, list[tuple[ChangeKind, str]]]:
    """How far the results after this transform are from the baseline's, and whether that is its own doing.

    Results that were off before it already are not held against it, unless it moves them itself by more than is
    allowed and did not in the baseline.
    """
    here, there = site(outputs, name), site(baseline, name)
    if here is None or there is None:
        return None, []
    drift = distance(outputs.after(here), baseline.after(there))
    inherited = distance(outputs.after(here - 1), baseline.after(there - 1))
    if drift == 0 or inherited == float("inf"):  # what is not a number already cannot get worse
        return drift, []
    own = distance(outputs.after(here), outputs.after(here - 1))
    own_before = distance(baseline.after(there), baseline.after(there - 1))
    moved = own > allowed >= own_before
    text = f"results are {off_text(outputs.after(here), baseline.after(there))}, {allowed:.1e} is allowed"
    if inherited == 0 or moved:
        kind: ChangeKind = "numeric drift not acceptable" if drift > allowed or moved else "numeric drift acceptable"
        return drift, [(kind, text)]
    if drift > allowed >= inherited:
        return drift, [("numeric drift not acceptable", f"{text}; {inherited:.1e} of it came from before")]
    return drift, []


def site(outputs: StepLogits, name: str) -> int | None:
    """The number of a transform's step; None where it was off."""
    return next((step.number for step in outputs.run.steps[1:] if step.transform == name), None)
