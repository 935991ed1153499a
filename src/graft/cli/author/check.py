"""`graft check`: the review of a transform, as a program."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graft.base.errors import UsageError
from graft.cli.documents import print_json
from graft.cli.options import ConfigFile, DType, Json, Plugins, Sets, TrustRemoteCode

if TYPE_CHECKING:
    from graft.workbench.check import CheckLine, CheckReport, CheckRequest, TransformCheck

STYLES = {"pass": "green", "fail": "red", "skip": "yellow"}
OTHER_DTYPES = ("bfloat16", "float16")  # the results are compared in these as well, unless a dtype is named


def check(
    transform: Annotated[str, typer.Argument(help="The transform; all that are on if left out.")] = "",
    model: Annotated[
        str, typer.Option(help="Registry name, checkpoint or folder of dumps; a tiny model if left out.")
    ] = "",
    all_models: Annotated[bool, typer.Option("--all-models", help="A tiny model of every family.")] = False,
    baseline: Annotated[Path | None, typer.Option(help="A saved run to compare with.", metavar="DIR")] = None,
    save_baseline: Annotated[Path | None, typer.Option(help="Keep this run, to compare with.", metavar="DIR")] = None,
    note: Annotated[Path | None, typer.Option(help="Write the iteration note.", metavar="FILE.md")] = None,
    tests: Annotated[Path | None, typer.Option(help="The tests, if not beside it.", metavar="DIR")] = None,
    run_tests: Annotated[bool, typer.Option("--run-tests", help="Run its tests, and record the result.")] = False,
    since: Annotated[
        str,
        typer.Option(help="Instead: what the patch since this revision touches, and what it lacks.", metavar="REV"),
    ] = "",
    dtype: DType = "auto",
    config: ConfigFile = None,
    sets: Sets = None,
    plugins: Plugins = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Go through the review list of a transform: names, docs, tests, matches, dumps, numbers, metadata.

    With --baseline, what changed since a saved run is classified for each transform. Where the results are wrong, the
    first bad transform and match are searched for by halves. The exit code is 1 where something is wrong.
    """
    if since:
        others = {
            "TRANSFORM": transform, "--model": model, "--all-models": all_models, "--baseline": baseline,
            "--save-baseline": save_baseline, "--note": note, "--tests": tests, "--run-tests": run_tests,
            "--config": config, "--set": sets, "--plugin": plugins,
        }  # fmt: skip
        if unused := [name for name, value in others.items() if value]:
            raise UsageError(f"--since looks at the patch alone; leave out {', '.join(unused)}")
        return patch_since(since, as_json)
    one = [(model, "--model"), (baseline, "--baseline"), (save_baseline, "--save-baseline"), (note, "--note")]
    if all_models and any(given for given, _ in one):
        flag = next(name for given, name in one if given)
        raise UsageError(f"{flag} is about one model; leave it or --all-models out")
    if tests is not None and not tests.is_dir():
        raise UsageError(f"--tests {tests} is not a folder")
    with without_collection(not all_models):
        from graft.passes.config import load_config
        from graft.workbench.check import CheckRequest

        settings = load_config(config, sets=sets or (), plugins=tuple(plugins or ()))
        request = CheckRequest(
            settings, transform, dtype, baseline, save_baseline, tests and tests.resolve(), note,
            trust_remote_code=trust_remote_code, run_tests=run_tests, dtypes=OTHER_DTYPES if dtype == "auto" else (),
        )  # fmt: skip
        if all_models:
            every_model(request, as_json)
        else:
            refuse_sets(model, sets)
            one_model(model, request, as_json)


def patch_since(rev: str, as_json: bool) -> None:
    from graft.cli.show import out
    from graft.workbench.check.since import review_patch

    found = review_patch(rev, Path.cwd())
    if as_json:
        print_json("check-since", found.to_dict())
        return
    out.print(f"{found.changed} files since {rev}", style="bold", markup=False)
    for one in found.transforms:
        tests = f"; tests: {', '.join(one.tests)}" if one.tests else ""
        out.print(f"  {one.transform}: {', '.join(one.files)}{tests}", markup=False, soft_wrap=True)
    for toggle in found.toggles:
        states = " → ".join(
            {True: "on", False: "off", None: "not listed"}[state] for state in (toggle.before, toggle.after)
        )
        text = f"  {toggle.transform}: {states} in {toggle.file}: {toggle.reason or 'no reason is given'}"
        out.print(text, markup=False, soft_wrap=True)
    for text in found.warnings:
        out.print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)
    if not found.transforms:
        out.print("no transform is touched", markup=False)


def refuse_sets(model: str, sets: list[str] | None) -> None:
    from graft.workbench.discover.sources import is_run

    if sets and model and is_run(model):
        raise UsageError(f"{model} is a folder of dumps, which --set cannot change; dump the model again")


@contextmanager
def without_collection(quick: bool) -> Iterator[None]:
    """Collecting among what torch and transformers leave behind takes 1.2 of 9 s, and frees next to nothing."""
    collecting = gc.isenabled()
    if quick:
        gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def one_model(model: str, request: CheckRequest, as_json: bool) -> None:
    from graft.cli.show import out, progress_bar
    from graft.workbench.check import check as run_check

    with progress_bar() as progress:
        report = run_check(model, request, progress)
    if as_json:
        print_json("check", report.to_dict())
    else:
        show(report, whole_list=bool(request.transform))
        for text in kept_files(request):
            out.print(text, markup=False, soft_wrap=True)
    if not report.ok:
        raise typer.Exit(1)


def kept_files(request: CheckRequest) -> list[str]:
    kept = [f"the run is kept in {request.save}; compare with --baseline {request.save}"] if request.save else []
    return kept + ([f"the note is in {request.note}"] if request.note else [])


def every_model(request: CheckRequest, as_json: bool) -> None:
    from graft.cli.show import out, progress_bar
    from graft.workbench.check import check_all

    with progress_bar() as progress:
        reports = list(check_all(request, progress))
    failures = [f"{report.model}: {text}" for report in reports for text in report.failures]
    if as_json:
        models = [report.to_dict() for report in reports]
        print_json("check-all-models", {"ok": not failures, "failures": failures, "models": models})
    else:
        show_models(reports)
        for text in failures:
            out.print(f"fail  {text}", style="red", markup=False, soft_wrap=True)
    if failures:
        raise typer.Exit(1)


def show(report: CheckReport, *, whole_list: bool) -> None:
    """whole_list: every line; else a table, and the lines that failed."""
    from graft.cli.show import out

    head = f"{report.model} ({report.dtype}, {report.device})"
    if whole_list:
        for checked in report.checks:
            counts = ", ".join(f"{count} {verdict}" for verdict, count in checked.counts.items() if count)
            out.print(f"{checked.name} on {head}: {counts}", style="bold", markup=False, soft_wrap=True)
            show_lines(checked.lines)
    else:
        show_table(report.checks, head)
        for checked in report.checks:
            show_lines([line for line in checked.lines if line.verdict == "fail"], f"{checked.name}: ")
    show_lines(report.whole)
    show_search(report)
    show_changes(report)
    for note in report.notes:
        out.print(note, markup=False, soft_wrap=True)
    said = f"{len(report.failures)} failed" if report.failures else "nothing failed"
    out.print(f"{said}, {report.seconds:.1f} s", style="red" if report.failures else "green")


def show_lines(lines: tuple[CheckLine, ...] | list[CheckLine], prefix: str = "") -> None:
    from graft.cli.show import out

    for line in lines:
        text = f"  {line.verdict}  {prefix}{line.check:<14}  {line.reason}"
        out.print(text, style=STYLES[line.verdict], markup=False, soft_wrap=True)


def show_table(checks: tuple[TransformCheck, ...], head: str) -> None:
    """A line a transform: how it came out, its matches, what was not looked at and why."""
    from graft.cli.show import out

    out.print(head, style="bold", markup=False, soft_wrap=True)
    for checked in checks:
        skipped = [line for line in checked.lines if line.verdict == "skip"]
        told = f"skipped {', '.join(line.check for line in skipped)}: {skipped[0].reason}" if skipped else ""
        matches = f"{checked.matches} {'match' if checked.matches == 1 else 'matches'}"
        text = f"  {checked.verdict}  {checked.name:<26} {matches:<11} {told}".rstrip()
        out.print(text, style=STYLES[checked.verdict], markup=False, soft_wrap=True)


def show_search(report: CheckReport) -> None:
    from graft.cli.show import out

    found = report.bisection
    if found is None:
        return
    site = f"match {found.number} of {found.matches}: {found.match}" if found.match else found.why_no_match
    text = f"first bad transform: {found.transform}; {site}; {found.runs} runs of at most {found.bound}"
    out.print(text, style="red", markup=False, soft_wrap=True)


def show_changes(report: CheckReport) -> None:
    """What differs from the baseline, a line each; what does not, as one number."""
    from graft.cli.show import out

    if not report.baseline:
        return
    out.print(f"against {report.baseline}", style="bold", markup=False, soft_wrap=True)
    same = [change for change in report.changes if change.kinds == ("unchanged",)]
    for change in report.changes:
        if change not in same:
            style = "red" if change.bad else "yellow"
            text = f"  {change.transform}: {', '.join(change.kinds)}: {change.reason}"
            out.print(text, style=style, markup=False, soft_wrap=True)
    if same:
        out.print(f"  unchanged: {', '.join(change.transform for change in same)}", markup=False, soft_wrap=True)


def show_models(reports: list[CheckReport]) -> None:
    from rich.table import Table

    from graft.cli.show import out

    table = Table(title="Every family", title_justify="left")
    for name in ("model", "pass", "fail", "skip", "matches", "end to end", "seconds"):
        table.add_column(name, justify="left" if name in ("model", "matches") else "right")
    for report in reports:
        counts = [str(sum(checked.counts[v] for checked in report.checks)) for v in ("pass", "fail", "skip")]
        only = report.checks[0] if len(report.checks) == 1 else None
        matches = only.of("matches").reason if only else str(sum(checked.matches for checked in report.checks))
        verdict = report.whole[0].verdict
        table.add_row(report.model, *counts, matches, f"[{STYLES[verdict]}]{verdict}[/]", f"{report.seconds:.1f}")
    out.print(table)
