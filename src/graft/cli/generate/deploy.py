"""`graft deploy`: an application of several replicas on a Ray cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.cli.documents import print_json
from graft.cli.options import Json

if TYPE_CHECKING:
    from graft.deploy.spec import AppSpec

AppFile = Annotated[
    str, typer.Argument(help="YAML: serve (options of graft serve), replicas, routing, …", metavar="FILE")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check the file and show what would run; needs no Ray.")]
Address = Annotated[str, typer.Option(help="Of the Ray cluster; auto: the one of this machine.")]


def deploy(
    ctx: typer.Context, file: AppFile, dry_run: DryRun = False, address: Address = "auto", as_json: Json = False
) -> None:
    """Run replicas of a model on a Ray cluster, or exchange those that run, one after another."""
    from graft.cli.waiting import end_waiting

    commands: Any = ctx.find_root().command
    spec = read_app(commands.commands["serve"], file)
    if dry_run:
        show(spec.found.plan(), as_json)
        return
    from graft.deploy.run import deploy as deploy_on

    end_waiting()
    told = deploy_on(spec, address)
    if as_json:
        print_json("deploy", told)
        return
    for name, count in told["lacking"].items():
        print(f"the cluster has {count:g} {name} too few for {spec.replicas.max} replicas; they wait until it grows")
    print(f"graft deploy: {told['name']} is {told['status'].lower()} at {told['url']} (model {spec.serve.names[0]})")


def read_app(command: Any, file: str) -> AppSpec:
    """command: `graft serve`, which knows its options."""
    from graft.base.errors import UsageError
    from graft.base.yaml_file import read_yaml
    from graft.cli.generate.serve_sources import options_of
    from graft.deploy.spec import SECTION, app_spec
    from graft.models.names import check_name
    from graft.serve.options import options_from

    read = read_yaml(Path(file))
    if not isinstance(read, Mapping):
        raise UsageError(f"{file} must be a mapping with serve, replicas, …, not {type(read).__name__}")
    given = dict(read)
    options = given.pop(SECTION, None) or {}
    if not isinstance(options, Mapping):
        raise UsageError(f"{file}: serve must be a mapping of options, not {options!r}")
    found = options_of(command, options, f"{file}: serve")
    if found.pop("replicas", 1) != 1:
        raise UsageError(f"{file}: serve: replicas is not part of serve; write it beside it")
    serve = options_from(found)
    if not serve.load.plugins:  # which may bring models
        check_name(serve.load.model)  # a replica would tell it after minutes
    return app_spec(given, serve, file)


def show(plan: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json("deploy-plan", plan)
        return
    import yaml

    print(yaml.safe_dump(json.loads(json.dumps(plan)), sort_keys=False).rstrip())
