"""`graft report`: a run as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graft.cli.documents import print_json
from graft.cli.options import Json, Plugins


def report(
    run: Annotated[Path, typer.Argument(help="A folder that graft dump wrote, or graft stages -o.", metavar="RUN")],
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
    """Write one self-contained HTML file: pipeline, layers, what each transform changed, candidates, kernel times.

    Of a folder that graft stages -o wrote: the seven stages as columns, in which a click follows a node.
    """
    from graft.workbench.stages.saved import is_story

    if is_story(str(run)):
        report_stages(run, output, {"--kernels": kernels, "--code": code}, as_json)
        return
    from graft.cli.show import out, progress_bar
    from graft.passes.registry import load_all
    from graft.workbench.report import write_report

    load_all(tuple(plugins or ()))
    with progress_bar() as progress:
        data = write_report(run, output, kernels, progress, code)
    size = output.stat().st_size
    if as_json:
        print_json("report", {"file": str(output), "bytes": size, **data.head, "counts": data.counts})
        return
    out.print(f"{output}: {size / 1e6:.2f} MB, {data.head['model']}", markup=False, soft_wrap=True)


def report_stages(folder: Path, output: Path, unused: dict[str, Path | None], as_json: bool) -> None:
    from graft.base.errors import UsageError
    from graft.cli.show import out
    from graft.workbench.report.stage_page import write_stage_page

    for name, value in unused.items():
        if value is not None:
            raise UsageError(f"{name} is for the report of a run; {folder} holds a story of graft stages")
    story = write_stage_page(folder, output)
    size = output.stat().st_size
    if as_json:
        kernels = len(story.kernels.kernels)
        print_json("report-stages", {"file": str(output), "bytes": size, "target": story.target, "kernels": kernels})
        return
    out.print(f"{output}: {size / 1e6:.2f} MB, stages of {story.target}", markup=False, soft_wrap=True)
