"""`graft new-transform`: the files of a new fusion, with tests that pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.options import Json

if TYPE_CHECKING:
    from graft.workbench.scaffold.plan import Written


def new_transform(
    name: Annotated[str, typer.Argument(help="In snake_case: registry key, YAML key and file name.")],
    op: Annotated[bool, typer.Option("--op", help="Also make the op that replaces the pattern.")] = False,
    pattern: Annotated[
        str | None,
        typer.Option(help="The function to find; a worked example if left out.", metavar="FILE.py:FUNCTION"),
    ] = None,
    replacement: Annotated[
        str | None, typer.Option(help="The function that takes its place.", metavar="FILE.py:FUNCTION")
    ] = None,
    stage: Annotated[str, typer.Option(help="match, fuse, state or schedule.")] = "match",
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="A checkout of graft, or a folder for a plugin; else the checkout around this folder.",
            metavar="DIR",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write files anew that are there already.")] = False,
    as_json: Json = False,
) -> None:
    """Write a transform, its YAML entry (off), its op if asked for, and its tests, which pass as they are.

    In a checkout of graft the files go into the library; anywhere else they make a plugin.
    """
    from graft.workbench.scaffold import plan

    written = plan.new_transform(
        name, folder, op=op, stage=stage, pattern=pattern, replacement=replacement, force=force
    )
    if as_json:
        print(json.dumps(as_dict(written)))
    else:
        show(written)


def as_dict(written: Written) -> dict[str, object]:
    return {
        "name": written.name,
        "root": str(written.root),
        "checkout": written.checkout,
        "files": [str(path.relative_to(written.root)) for path in written.files],
        "changed": [str(path.relative_to(written.root)) for path in written.changed],
        "op": written.op,
        "no_kernel": written.no_kernel,
    }


def show(written: Written) -> None:
    from rich.console import Console

    out = Console(highlight=False)
    out.print(f"{written.name} in {written.root}", style="bold", markup=False, soft_wrap=True)
    for mark, paths in (("new", written.files), ("changed", written.changed)):
        for path in paths:
            out.print(f"  {mark:<8} {path.relative_to(written.root)}", markup=False, soft_wrap=True)
    if written.no_kernel:
        out.print(f"no Triton kernel was generated: {written.no_kernel}", markup=False, soft_wrap=True)
    out.print("next", style="cyan")
    test = next(path for path in written.files if path.name == f"test_{written.name}.py").relative_to(written.root)
    using = "" if written.checkout else f" --plugin {written.name} --config {written.name}.yaml"
    path = "" if written.checkout else "PYTHONPATH=. "
    for line in (
        f"python -m pytest {test}",
        f"{path}graft explain MODEL {written.name}{using}",
        f"{path}graft run PROMPT --set transforms.{written.name}.enabled=true --verify --table{using}",
    ):
        out.print(f"  {line}", markup=False, soft_wrap=True)
