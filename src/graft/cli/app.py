"""`graft`: the verbs."""

from __future__ import annotations

from typing import Annotated

import typer

from graft import __version__
from graft.cli.author.autofuse import autofuse
from graft.cli.author.check import check
from graft.cli.author.compare import compare
from graft.cli.author.discover import discover
from graft.cli.author.mcp import mcp
from graft.cli.author.new_transform import new_transform
from graft.cli.author.note import note
from graft.cli.author.repro import repro
from graft.cli.author.search import search
from graft.cli.author.skills import skills
from graft.cli.generate.chat import chat
from graft.cli.generate.compile import compile
from graft.cli.generate.deploy import deploy
from graft.cli.generate.events import events
from graft.cli.generate.run import run
from graft.cli.generate.serve import serve
from graft.cli.guard import JsonGroup, guarded
from graft.cli.inspect.cache import cache
from graft.cli.inspect.config import config
from graft.cli.inspect.diff import diff
from graft.cli.inspect.dump import dump
from graft.cli.inspect.explain import explain
from graft.cli.inspect.export import export
from graft.cli.inspect.models import models
from graft.cli.inspect.ops import ops
from graft.cli.inspect.report import report
from graft.cli.inspect.stages import stages
from graft.cli.inspect.transforms import transforms
from graft.cli.measure.bench import bench
from graft.cli.measure.eval import eval
from graft.cli.measure.tune import tune

app = typer.Typer(
    name="graft",
    cls=JsonGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def show_version(asked: bool) -> None:
    if asked:
        print(f"graft {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Compile an unmodified decoder into a fast, inspectable engine; write, check and ship graph fusions."""


VERBS = (
    run,
    chat,
    serve,
    deploy,
    compile,
    bench,
    eval,
    events,
    transforms,
    explain,
    ops,
    tune,
    config,
    models,
    dump,
    diff,
    discover,
    search,
    autofuse,
    new_transform,
    check,
    compare,
    repro,
    report,
    export,
    mcp,
)
for verb in VERBS:
    app.command()(guarded(verb))
app.add_typer(stages, name="stages")
app.add_typer(cache, name="cache")
app.add_typer(skills, name="skills")
app.add_typer(note, name="note")


def main() -> None:
    app()
