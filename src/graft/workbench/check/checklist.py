"""The list for one model: from a name or a folder of dumps to a report."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from graft.base.errors import DumpError, UsageError
from graft.base.files import Progress
from graft.workbench.check import baseline as saved
from graft.workbench.check.bisect import Bisection
from graft.workbench.check.end_to_end import end_to_end, in_other_dtypes
from graft.workbench.check.graphs import run_lines
from graft.workbench.check.line import CheckLine
from graft.workbench.check.negative_tests import negative_line, negative_tests, own_files
from graft.workbench.check.note import note_text, write_note
from graft.workbench.check.outputs import StepLogits, limit, stored_outputs
from graft.workbench.check.request import CheckRequest, check_request, chosen_model, names_of
from graft.workbench.check.results import CheckReport, TransformCheck
from graft.workbench.check.tests_run import run_tests
from graft.workbench.check.trial import CheckTrial, read_run, try_model
from graft.workbench.check.written import Home, home_of, written_lines
from graft.workbench.discover.sources import is_run


def check(model: str, request: CheckRequest, progress: Progress | None = None) -> CheckReport:
    """model: a registry name, a checkpoint, or a folder of dumps; '' for a tiny model that the transform matches."""
    started = time.perf_counter()
    check_request(request)
    kept = saved.open_baseline(request.baseline) if request.baseline else None  # a bad one is told before any work
    if model and is_run(model):
        if request.save is not None:
            raise UsageError(f"{model} is a folder of dumps already; --save-baseline is for a model that is run")
        report = check_trial(read_run(model), request, kept)
    else:
        name, dtype = chosen_model(model, request, kept)
        with tempfile.TemporaryDirectory() as scratch:
            folder = request.save or Path(scratch)
            trial = try_model(
                name, request.running, folder, dtype=dtype, checked=names_of(request), progress=progress,
                trust_remote_code=request.trust_remote_code, other_devices=request.other_devices,
            )  # fmt: skip
            if progress:
                progress("looking at the run", 0, 1)
            others = in_other_dtypes(name, trial, request, Path(scratch), progress)
            report = check_trial(trial, request, kept, others)
    return replace(report, seconds=time.perf_counter() - started)


def check_trial(
    trial: CheckTrial, request: CheckRequest, kept: saved.Baseline | None = None,
    others: Sequence[tuple[CheckLine, Bisection | None]] = (),
) -> CheckReport:  # fmt: skip
    """others: how the results are in other dtypes, and what is wrong there."""
    run = trial.run
    manifest = run.manifest
    names = names_of(request) if request.transform or trial.captured is not None else ran(trial)
    if kept is not None:
        saved.check_same_model(kept.run, manifest.model, manifest.dtype)
    fresh = trial.captured is not None
    outputs = StepLogits(run, trial.state, {} if fresh else stored_outputs(run.folder), fresh=fresh)
    checks = tuple(check_one(trial, name, request) for name in names)
    allowed = limit(run, getattr(torch, manifest.dtype)) if not outputs.problem else 0.0
    try:
        line, found = end_to_end(trial, outputs, allowed)
    except DumpError as error:
        line, found = CheckLine("end to end", "fail", str(error)), None
    changes, notes = [], list(trial.notes)
    if kept is not None:
        compared = names if request.transform else saved.with_lost(names, kept)
        told = saved.numbers_notes(outputs, kept)
        changes = [saved.compare(trial.graphs, outputs, kept, name, allowed) for name in compared]
        notes += [*saved.other_makings(kept, run), *told]
    if request.save is not None and not outputs.problem:
        outputs.save()
    folder = str(kept.run.folder) if kept else ""
    found = next((wrong for wrong in (found, *(wrong for _, wrong in others)) if wrong), None)
    whole = (line, *(line for line, _ in others))
    report = CheckReport(
        manifest.model, manifest.dtype, manifest.device, checks, whole, folder, tuple(changes), found,
        tuple(notes), versions=manifest.versions,
    )  # fmt: skip
    if request.note is not None:
        text = note_text(trial, report, request.config, home_of(request.transform, request.tests))
        write_note(request.note, text)
    return report


def ran(trial: CheckTrial) -> list[str]:
    return [step.transform for step in trial.run.steps[1:]]


def check_one(trial: CheckTrial, name: str, request: CheckRequest) -> TransformCheck:
    home = home_of(name, request.tests)
    lines = [
        *written_lines(name, request.config, home),
        negative_line(name, home.tests),
        *run_lines(trial, name, wanted=request.must_match and name == request.transform),
    ]
    tests = run_tests(own_tests(name, home), home.root) if request.run_tests else None
    lines += [tests.line()] if tests else []
    record = trial.run.report.transforms[name]
    return TransformCheck(name, tuple(lines), record.summary, len(record.matches), tests)


def own_tests(name: str, home: Home) -> list[Path]:
    """The test files that are about this transform; in a note they are the command that runs them."""
    return [] if home.tests is None else list(own_files(name, home.tests, negative_tests(name, home.tests)))
