"""`graft check`: the review of a transform, as a program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.options import ConfigFile, DType, Json, Plugins, Sets

if TYPE_CHECKING:
    from graft.workbench.check import CheckReport

STYLES = {"pass": "green", "fail": "red", "skip": "yellow"}


def check(
    transform: Annotated[str, typer.Argument(help="The transform; all that are on if left out.")] = "",
    model: Annotated[
        str, typer.Option(help="Registry name, checkpoint or folder of dumps; a tiny model if left out.")
    ] = "",
    baseline: Annotated[Path | None, typer.Option(help="A run to compare with.", metavar="DIR")] = None,
    save_baseline: Annotated[Path | None, typer.Option(help="Keep this run there.", metavar="DIR")] = None,
    note: Annotated[Path | None, typer.Option(help="Write the iteration note.", metavar="FILE.md")] = None,
    tests: Annotated[Path | None, typer.Option(help="The folder of tests.", metavar="DIR")] = None,
    dtype: DType = "auto",
    config: ConfigFile = None,
    sets: Sets = None,
    plugins: Plugins = None,
    as_json: Json = False,
) -> None:
    """Go through the review list of a transform on a model. The exit code is 1 where something is wrong."""
    from graft.cli.show import progress_bar
    from graft.transforms.config import load_config
    from graft.workbench.check import Request
    from graft.workbench.check import check as run_check

    settings = load_config(config, sets=sets or (), plugins=tuple(plugins or ()))
    request = Request(settings, transform, dtype, baseline, save_baseline, tests, note)
    with progress_bar() as progress:
        report = run_check(model, request, progress)
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        show(report)
    if not report.ok:
        raise typer.Exit(1)


def show(report: CheckReport) -> None:
    from graft.cli.show import out

    for checked in report.checks:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in checked.counts.items() if count)
        head = f"{checked.name} on {report.model} ({report.dtype}, {report.device}): {counts}"
        out.print(head, style="bold", markup=False, soft_wrap=True)
        for line in checked.lines:
            out.print(
                f"  {line.verdict}  {line.check:<15} {line.reason}",
                style=STYLES[line.verdict],
                markup=False,
                soft_wrap=True,
            )
    for line in report.whole:
        out.print(
            f"{line.verdict}  {line.check:<15} {line.reason}",
            style=STYLES[line.verdict],
            markup=False,
            soft_wrap=True,
        )
    for change in report.changes:
        out.print(f"{change.transform}: {', '.join(change.kinds)} {change.reason}", markup=False, soft_wrap=True)
    for note in report.notes:
        out.print(note, markup=False, soft_wrap=True)
    out.print(f"{report.seconds:.1f} s", style="dim")
