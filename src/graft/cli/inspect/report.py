"""`graft report`: a run as one HTML file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from graft.cli.options import Json, Plugins


def report(
    run: Annotated[Path, typer.Argument(help="A folder that graft dump wrote.", metavar="RUN")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.", metavar="FILE")] = Path(
        "report.html"
    ),
    kernels: Annotated[
        Path | None,
        typer.Option(help="What graft bench --kernels --json printed. [RUN/kernels.json]", metavar="FILE"),
    ] = None,
    code: Annotated[
        Path | None,
        typer.Option(help="What Inductor generated for the last graph. [RUN/inductor.py]", metavar="FILE"),
    ] = None,
    plugins: Plugins = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML file: pipeline, layers, what each transform changed, candidates, kernel times."""
    from graft.cli.show import out, progress_bar
    from graft.passes.registry import load_all
    from graft.workbench.report import write_report

    load_all(tuple(plugins or ()))
    with progress_bar() as progress:
        data = write_report(run, output, kernels, progress, code)
    size = output.stat().st_size
    if as_json:
        print(json.dumps({"file": str(output), "bytes": size, **data.head, "counts": data.counts}))
        return
    out.print(f"{output}: {size / 1e6:.2f} MB, {data.head['model']}", markup=False, soft_wrap=True)
