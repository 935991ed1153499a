"""`graft new-transform`: the files of a new fusion, with tests that pass."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.documents import print_json
from graft.cli.options import ConfigFile, DType, Json, Plugins, Sets

if TYPE_CHECKING:
    from graft.workbench.scaffold.candidate import Seed
    from graft.workbench.scaffold.destination import Destination
    from graft.workbench.scaffold.plan import Written


Name = Annotated[str, typer.Argument(help="In snake_case: registry key, YAML key and file name.")]
Op = Annotated[bool, typer.Option("--op", help="Also make the op that replaces the pattern.")]
PatternFunction = Annotated[
    str | None, typer.Option(help="The function to find; a worked example if left out.", metavar="FILE.py:FUNCTION")
]
Replacement = Annotated[
    str | None, typer.Option(help="The function that takes its place.", metavar="FILE.py:FUNCTION")
]
Shapes = Annotated[
    str | None, typer.Option(help="Sizes of the pattern's arguments: 'x: b s d, w: n d'.", metavar="SHAPES")
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        help="A candidate of graft discover: its id, with --model; or FILE.json:ID of graft discover --json.",
        metavar="CANDIDATE",
    ),
]
FoundIn = Annotated[
    str | None, typer.Option(help="Where the candidate was found: a model or a folder of dumps.", metavar="MODEL")
]
StageName = Annotated[
    str | None,
    typer.Option(
        help="match, shard, fuse, state or schedule; match if left out, with --from schedule.", metavar="STAGE"
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        help="A checkout of graft, or a folder for a plugin; else the checkout around this folder.",
        metavar="DIR",
    ),
]
Package = Annotated[
    Path | None,
    typer.Option(help="Make an installable package there (tests, CI), or add to the one that is.", metavar="DIR"),
]
Force = Annotated[bool, typer.Option("--force", help="Write files anew that are there already.")]


def new_transform(
    name: Name,
    op: Op = False,
    pattern: PatternFunction = None,
    replacement: Replacement = None,
    shapes: Shapes = None,
    candidate: From = None,
    model: FoundIn = None,
    stage: StageName = None,
    folder: Folder = None,
    package: Package = None,
    force: Force = False,
    dtype: DType = "auto",
    config: ConfigFile = None,
    sets: Sets = None,
    plugins: Plugins = None,
    as_json: Json = False,
) -> None:
    """Write a transform, its YAML entry (off), its op if asked for, and its tests, which pass as they are.

    In a checkout of graft the files go into the library; anywhere else they make a plugin, with --package one that is
    installed, and that graft finds by its entry point. --from takes the pattern
    from what graft discover found (with its --dtype, --config, --set), and its op or the kernel that exists for it.
    """
    from graft.workbench.scaffold import plan

    location = destination(folder, package)
    if candidate is None:
        refuse_unused({"--model": model, "--dtype": dtype, "--config": config, "--set": sets})
        written = plan.new_transform(
            name, location, op=op, stage=stage, pattern=pattern, replacement=replacement, shapes=shapes, force=force
        )
    else:
        seed = read_candidate(candidate, model, pattern or replacement or shapes, dtype, config, sets, plugins)
        written = plan.transform_from(name, seed, location, op=op, stage=stage, force=force)
    if as_json:
        print_json("new-transform", as_dict(written))
    else:
        show(written)


def destination(folder: Path | None, package: Path | None) -> Destination:
    from graft.base.errors import UsageError
    from graft.workbench.scaffold.destination import Destination

    if package is None:
        return Destination.of(folder)
    if folder is not None:
        raise UsageError("--dir and --package both name a folder; choose one")
    return Destination.in_package(package)


def refuse_unused(options: dict[str, object]) -> None:
    from graft.base.errors import UsageError

    for option, value in options.items():
        if value and value != "auto":
            raise UsageError(f"{option} belongs to --from CANDIDATE, which is not there")


def read_candidate(
    candidate: str,
    model: str | None,
    function: str | None,
    dtype: str,
    config: str | None,
    sets: list[str] | None,
    plugins: list[str] | None,
) -> Seed:
    """Discovers again, as graft discover would, unless the candidate is in a file."""
    from graft.base.errors import UsageError
    from graft.cli.show import progress_bar
    from graft.passes.config import load_config
    from graft.workbench.discover import Discovery
    from graft.workbench.discover.sources import discover_model, discover_run, is_run
    from graft.workbench.scaffold.candidate import read_seed

    if function:
        raise UsageError(
            "--from brings its own pattern and replacement; leave out --pattern, --replacement and --shapes"
        )
    if model is None:
        return read_seed(candidate, None)
    dumps = is_run(model)
    if dumps and (config or sets):
        raise UsageError(f"{model} is a folder of dumps, which --config and --set cannot change; name the model")
    settings = load_config(config, sets=sets or (), plugins=tuple(plugins or ()))

    def found() -> Discovery:
        with progress_bar() as progress:
            if dumps:
                return discover_run(model, progress=progress)
            return discover_model(model, settings, dtype, progress=progress)

    return read_seed(candidate, found)


def as_dict(written: Written) -> dict[str, object]:
    return {
        "name": written.name,
        "root": str(written.root),
        "checkout": written.checkout,
        "package": written.package,
        "files": [str(path.relative_to(written.root)) for path in written.files],
        "changed": [str(path.relative_to(written.root)) for path in written.changed],
        "op": written.op,
        "no_kernel": written.no_kernel,
        "note": written.note,
    }


def show(written: Written) -> None:
    from rich.console import Console

    out = Console(highlight=False, emoji=False)
    out.print(f"{written.name} in {written.root}", style="bold", markup=False, soft_wrap=True)
    for mark, paths in (("new", written.files), ("changed", written.changed)):
        for path in paths:
            out.print(f"  {mark:<8} {path.relative_to(written.root)}", markup=False, soft_wrap=True)
    if written.no_kernel:
        out.print(f"no Triton kernel was generated: {written.no_kernel}", markup=False, soft_wrap=True)
    if written.note:
        out.print(written.note, markup=False, soft_wrap=True)
    out.print("next", style="cyan")
    for line in next_lines(written):
        out.print(f"  {line}", markup=False, soft_wrap=True)


def next_lines(written: Written) -> list[str]:
    name, enabled = written.name, f"--set transforms.{written.name}.enabled=true"
    if written.package:
        first, using = [f"pip install -e {shlex.quote(str(written.root))}"], ""
        test = f"--pyargs {written.package}"
    else:
        own = next(path for path in written.files if path.name == f"test_{name}.py")
        first, test = [], str(own.relative_to(written.root))
        using = "" if written.checkout else f" --plugin {name}.py"
    return [
        *first,
        f"python -m pytest {test}",
        f"graft explain MODEL {name}{using}",
        f"graft run PROMPT {enabled} --verify --table{using}",
    ]
