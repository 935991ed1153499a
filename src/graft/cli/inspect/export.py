"""`graft export`: a run for Perfetto, Model Explorer, or as a program of torch.export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.options import Device, Json, Plugins

if TYPE_CHECKING:
    from graft.workbench.export.write import Exported

FORMATS = ("perfetto", "model-explorer", "pt2")


def export(
    run: Annotated[Path, typer.Argument(help="A folder that graft dump wrote.", metavar="RUN")],
    form: Annotated[str, typer.Option("--format", "-f", help=", ".join(FORMATS), metavar="FORMAT")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write.", metavar="FILE")],
    step: Annotated[
        str, typer.Option(help="The graph after this transform, or `captured`; else the last.", metavar="TRANSFORM")
    ] = "",
    tokens: Annotated[int, typer.Option(help="perfetto: tokens in the predicted step.", min=1)] = 1,
    timed: Annotated[
        bool, typer.Option("--time", help="perfetto: also run the graph and draw each call as it was timed.")
    ] = False,
    device: Device = "cpu",
    plugins: Plugins = None,
    as_json: Json = False,
) -> None:
    """Write a run for another tool.

    perfetto: the pipeline (each transform with its matches, rewriting, checks) and the calls of a step.
    model-explorer: the captured graph and the chosen one, modules as layers.
    pt2: the chosen graph as a program that torch.export.load runs and Netron opens; it needs a dump with --weights.
    """
    from graft.base.errors import UsageError, near
    from graft.cli.show import busy
    from graft.passes.registry import load_all
    from graft.workbench.export.write import export_run

    if form not in FORMATS:
        raise UsageError(f"--format {form}: unknown{near(form, FORMATS)}")
    if timed and form != "perfetto":
        raise UsageError(f"--time draws calls in a trace; it belongs to --format perfetto, not {form}")
    load_all(tuple(plugins or ()))
    with busy(f"exporting for {form}"):
        done = export_run(run, form, output, step=step, tokens=tokens, timed=timed, device=device)
    if as_json:
        print(json.dumps({"file": str(done.file), "format": form, "step": done.step, "notes": done.notes}))
    else:
        show(done)


def show(done: Exported) -> None:
    from graft.cli.show import out

    out.print(f"{done.file}: {done.what}", markup=False, soft_wrap=True)
    for note in done.notes:
        out.print(f"  {note}", markup=False, soft_wrap=True)
