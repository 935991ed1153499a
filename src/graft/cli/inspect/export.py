"""`graft export`: a run for Perfetto or Model Explorer, a program of torch.export, a package of AOTInductor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.documents import print_json
from graft.cli.options import Device, Json, Plugins

if TYPE_CHECKING:
    from graft.workbench.export.write import Exported

FORMATS = ("perfetto", "model-explorer", "pt2", "aoti")
TOKENS = (8, 12)  # of the two calls that an exported model is made from and checked with: lengths are open


def export(
    run: Annotated[
        Path,
        typer.Argument(help="A folder of graft dump; aoti: or a model, or FILE.py:FUNCTION.", metavar="RUN"),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write.", metavar="FILE")],
    form: Annotated[str, typer.Option("--format", "-f", help=", ".join(FORMATS), metavar="FORMAT")] = "",
    aoti: Annotated[bool, typer.Option("--aoti", help="The same as --format aoti.")] = False,
    fusions: Annotated[
        bool, typer.Option("--fusions", help="aoti: with graft's fusions, whose ops Python has to register.")
    ] = False,
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
    aoti: a package that torch._inductor.aoti_load_package runs without compiling. It is loaded and run in a fresh
    process and compared with eager before it is written.
    """
    from graft.base.errors import UsageError, near
    from graft.cli.show import busy
    from graft.passes.registry import load_all
    from graft.workbench.export.write import export_run

    if aoti and form not in ("", "aoti"):
        raise UsageError(f"--aoti and --format {form} are two formats; choose one")
    form = "aoti" if aoti else form
    if form not in FORMATS:
        raise UsageError(f"--format {form or 'is missing'}: unknown{near(form, FORMATS)}")
    if fusions and form != "aoti":
        raise UsageError(f"--fusions is for packages of AOTInductor (--aoti), not for {form}")
    if timed and form != "perfetto":
        raise UsageError(f"--time draws calls in a trace; it belongs to --format perfetto, not {form}")
    load_all(tuple(plugins or ()))
    if form == "aoti":
        export_package(str(run), output, step, device, fusions, as_json)
        return
    with busy(f"exporting for {form}"):
        done = export_run(run, form, output, step=step, tokens=tokens, timed=timed, device=device)
    if as_json:
        print_json("export", {"file": str(done.file), "format": form, "step": done.step, "notes": done.notes})
    else:
        show(done)


def show(done: Exported) -> None:
    from graft.cli.show import out

    out.print(f"{done.file}: {done.what}", markup=False, soft_wrap=True)
    for note in done.notes:
        out.print(f"  {note}", markup=False, soft_wrap=True)


def export_package(name: str, output: Path, step: str, device: str, fusions: bool, as_json: bool) -> None:
    from dataclasses import asdict

    from graft.base.errors import ExportRefused, UsageError
    from graft.cli.show import out, progress_bar
    from graft.passes.dumps import WEIGHTS
    from graft.workbench.export.aoti import run_program, target_program, write_package
    from graft.workbench.export.write import step_named
    from graft.workbench.runs import open_run
    from graft.workbench.stages.targets import find_target

    with progress_bar() as progress:
        if Path(name).is_dir():
            opened = open_run(name)
            if not (opened.folder / WEIGHTS).is_file():
                raise ExportRefused(f"{name} holds no weights; dump the model again with --weights")
            made = run_program(opened, step_named(opened, step))
        elif step:
            raise UsageError("--step is for a folder of graft dump; a model is exported as it is")
        else:
            progress("exporting", 0, 2)
            made = target_program(find_target(name, TOKENS, progress, device=device))
        done = write_package(made, output, fusions=fusions, progress=progress)
    if as_json:
        print_json("export", {**asdict(done), "file": str(done.file), "format": "aoti"})
        return
    calls = "1 call" if done.calls == 1 else f"{done.calls} calls"
    out.print(f"{done.file}: {done.bytes / 1e6:.2f} MB, ran in a fresh process", markup=False, soft_wrap=True)
    what = f"loaded in {done.load_seconds:.2f} s, a call takes {done.call_us:.0f} µs"
    out.print(f"  {what}, {calls} within {done.error:.1e} of eager", markup=False, soft_wrap=True)
    if done.dynamic:
        out.print(f"  open sizes: {'; '.join(done.dynamic)}", markup=False, soft_wrap=True)
    for module in done.modules:
        out.print(
            f"  import {module} before loading it: it calls ops that Python registers", markup=False, soft_wrap=True
        )
