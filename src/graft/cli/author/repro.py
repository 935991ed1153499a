"""`graft repro`: one match of a run as a Python file that runs by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from graft.cli.options import Json, Plugins


def repro(
    run: Annotated[Path, typer.Argument(help="A folder that graft dump wrote.", metavar="RUN")],
    match: Annotated[
        str, typer.Option("--match", help="fuse_rope:3, or 3 with --transform; left out: list them.", metavar="ID")
    ] = "",
    transform: Annotated[str, typer.Option("--transform", "-t", help="The matches of this one.")] = "",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write; else repro_TRANSFORM_N.py.", metavar="FILE")
    ] = None,
    plugins: Plugins = None,
    as_json: Json = False,
) -> None:
    """Write one runnable file with what a match replaced, its replacement, seeded inputs and the comparison.

    The file exits with 0 when both give the same and with 1 when not. Weights are those of the dump where it has them
    (graft dump --weights), else random.
    """
    from graft.base.files import write_together
    from graft.cli.show import busy, out
    from graft.passes.registry import load_all
    from graft.workbench.repro.write import find_match, matches_of, repro_source
    from graft.workbench.runs import open_run

    load_all(tuple(plugins or ()))
    opened = open_run(run)
    if not match:
        listed = matches_of(opened, transform)
        if as_json:
            print(json.dumps([{"id": one.id, "anchor": one.record.anchor} for one in listed]))
        for one in listed if not as_json else ():
            nodes = f"{len(one.record.replaced)} → {len(one.record.made)} calls"
            out.print(f"{one.id:<28} {nodes:<16} {one.record.anchor}", markup=False, soft_wrap=True)
        return
    chosen = find_match(opened, match, transform)
    with busy("cutting the match out"):
        text = repro_source(opened, chosen)
    path = output or Path(f"repro_{chosen.id.replace(':', '_')}.py")
    write_together({path: text})
    if as_json:
        print(json.dumps({"id": chosen.id, "file": str(path), "anchor": chosen.record.anchor}))
    else:
        out.print(f"{chosen.id} {chosen.record.anchor}", markup=False, soft_wrap=True)
        out.print(f"next  python {path}", markup=False, soft_wrap=True)
