"""`graft diff`: what a transform did to a graph, or what is different between two runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.base.errors import UsageError
from graft.cli.documents import print_json
from graft.cli.options import Json

if TYPE_CHECKING:
    from graft.workbench.diff_text import StyledLine

STYLES = {"title": "bold", "head": "cyan", "added": "green", "removed": "red", "changed": "yellow"}


def diff(
    run: Annotated[Path, typer.Argument(help="A folder that graft dump wrote.", metavar="RUN")],
    other: Annotated[Path | None, typer.Argument(help="Another one, to compare with.", metavar="[RUN_B]")] = None,
    transform: Annotated[
        str, typer.Option("--transform", "-t", help="The transform: before and after it, or after it in both runs.")
    ] = "",
    unfold: Annotated[bool, typer.Option("--all", help="Show every layer, equal ones too.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a review.")] = False,
    strict: Annotated[
        bool, typer.Option(help="Refuse runs of two models, which otherwise is a note, and plugins that do not load.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what a transform did to the graph (RUN --transform T), or what differs between two runs (RUN_A RUN_B).

    Nodes are compared by what they are, not by name, and equal layers are shown once. The exit code is 0 with and
    without differences; 1 says that a folder could not be read, 2 that the request was wrong.
    """
    if as_json and as_markdown:
        raise UsageError("--json and --markdown are two forms of one answer; choose one")
    if other is None and not transform:
        raise UsageError("graft diff RUN needs --transform T (before and after it), or a second run to compare with")
    from graft.cli.show import busy

    with busy("comparing graphs"):
        if other is None:
            lines, document = one_run(run, transform, unfold)
        else:
            lines, document = two_runs(run, other, transform, unfold, strict)
    if as_json:
        print_json("diff", document)
    elif as_markdown:
        from graft.workbench.diff_text import markdown

        print(markdown(lines), end="")
    else:
        show(lines)


def one_run(folder: Path, transform: str, unfold: bool) -> tuple[list[StyledLine], dict[str, Any]]:
    from graft.workbench.diff_runs import diff_transform
    from graft.workbench.diff_text import graph_dict, transform_lines
    from graft.workbench.runs import open_run

    run = open_run(folder)
    found = diff_transform(run, transform)
    record = run.report.transforms[transform]
    head = {"run": str(folder), "model": run.manifest.model, "transform": transform, "status": record.status}
    counts = {"matches": len(record.matches), "near_misses": len(record.near_misses)}
    lines = transform_lines(run.manifest.model, record, found, unfold=unfold)
    return lines, {**head, **counts, "graph": graph_dict(found)}


def two_runs(
    before: Path, after: Path, transform: str, unfold: bool, strict: bool
) -> tuple[list[StyledLine], dict[str, Any]]:
    from graft.workbench.diff_runs import as_dict, diff_runs
    from graft.workbench.diff_text import graph_dict, run_lines
    from graft.workbench.runs import open_run

    found = diff_runs(open_run(before), open_run(after), transform, strict=strict)
    graph = graph_dict(found.graph) if found.graph is not None else None
    return run_lines(found, unfold=unfold), {**as_dict(found), "graph": graph}


def show(lines: list[StyledLine]) -> None:
    from graft.cli.show import out

    for line in lines:
        out.print(line.text, style=STYLES.get(line.style), markup=False, soft_wrap=True)
