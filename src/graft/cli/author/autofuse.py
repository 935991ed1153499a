"""`graft autofuse`: fusions that are found, written, checked, measured and kept without anybody's help."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.documents import print_json
from graft.cli.options import Backend, ConfigFile, Device, DType, Json, Plugins, Sets, TrustRemoteCode

if TYPE_CHECKING:
    from graft.workbench.autofuse import CandidateOutcome, Ledger

STYLES = {"kept": "green", "wrong": "red", "failed": "red", "refused": "yellow", "no gain": "yellow"}


def autofuse(
    model: Annotated[str, typer.Argument(help="Registry name or model folder.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The package to write.", metavar="PACKAGE")] = Path(
        "autofused"
    ),
    budget: Annotated[str, typer.Option(help="Time for all of it: 90s, 10m, 1h.", metavar="TIME")] = "10m",
    steps: Annotated[
        int | None, typer.Option(help="Instead: try so many candidates, however long it takes.", metavar="N")
    ] = None,
    gain: Annotated[float, typer.Option(help="The share of a step that a fusion must bring.")] = 0.02,
    own: Annotated[bool, typer.Option("--own-kernels", help="Write kernels where some exist, too.")] = False,
    limit: Annotated[float, typer.Option(help="Seconds for one candidate.")] = 600.0,
    prompt: Annotated[int, typer.Option(help="Tokens of the prefill that is measured.")] = 128,
    new: Annotated[int, typer.Option(help="Decode steps that are measured.", min=1)] = 16,
    repeats: Annotated[int, typer.Option(help="Of each measurement, with and without in turns.")] = 7,
    dtype: DType = "auto",
    device: Device = "auto",
    backend: Backend = "auto",
    config: ConfigFile = None,
    sets: Sets = None,
    plugins: Plugins = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Find what a model could fuse, write it, check it, measure it, and keep in a package what pays.

    Each candidate is tried in a process of its own: its tests, the list of graft check, its kernels alone, and an
    engine with it beside one without. A run that was interrupted goes on where it was.
    """
    from graft.cli.show import out, progress_bar
    from graft.workbench.autofuse import AutofuseRequest, read_budget
    from graft.workbench.autofuse import autofuse as run

    request = AutofuseRequest(
        model, output, None if steps is not None else read_budget(budget), steps, device, backend, dtype, config,
        tuple(sets or ()), tuple(plugins or ()), own, gain, limit, prompt, new, repeats, trust_remote_code,
    )  # fmt: skip
    with progress_bar() as progress:
        ledger = run(request, None if as_json else show_one, progress)
    if as_json:
        print_json(
            "autofuse", {**ledger.to_dict(), "package": str(output), "kept": [o.transform for o in ledger.kept]}
        )
        return
    show_rest(ledger)
    out.print(ending(ledger, output), markup=False, soft_wrap=True)


def show_one(outcome: CandidateOutcome) -> None:
    from graft.cli.show import out

    head = f"{outcome.id}  {outcome.status}  {outcome.title} × {outcome.count}  ({outcome.seconds:.0f} s)"
    out.print(head, style=STYLES.get(outcome.status, ""), markup=False, soft_wrap=True)
    share = f"{outcome.predicted_share[0]:.1%}" if outcome.predicted_share else ""
    out.print(f"  predicted    {share} of a decode step", markup=False, soft_wrap=True)
    if outcome.kernels:
        out.print(f"  written      {outcome.transform}: {', '.join(outcome.kernels)}", markup=False, soft_wrap=True)
    out.print(f"  why          {outcome.reason}", markup=False, soft_wrap=True)


def show_rest(ledger: Ledger) -> None:
    from graft.cli.show import out

    for outcome in ledger.outcomes:
        if not outcome.decided:
            text = f"{outcome.id}  {outcome.status}  {outcome.title} × {outcome.count}: {outcome.reason}"
            out.print(text, style="dim", markup=False, soft_wrap=True)


def ending(ledger: Ledger, package: Path) -> str:
    kept = len(ledger.kept)
    if not kept:
        return f"nothing was kept; {package}/AUTOFUSE.md says why"
    folder = package if package.is_absolute() else f"./{package}"
    return f"{kept} kept in {package}: pip install -e {folder}; {package}/AUTOFUSE.md is the table"
