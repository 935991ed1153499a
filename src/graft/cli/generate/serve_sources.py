"""The options of `graft serve` from everywhere: the command, then GRAFT_SERVE_*, then the file of --config."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
import yaml

from graft.base.errors import UsageError, near
from graft.base.yaml_file import read_yaml

PREFIX = "GRAFT_SERVE_"
PIPELINE = ("verify", "kernels", "transforms")  # of a file: laid over default.yaml, as with every verb
HERE_ALONE = ("help", "traceback", "strict")  # of the command alone


def layered(
    ctx: typer.Context, given: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """given: what the command line has, with defaults. An unknown name is an error wherever it stands."""
    options = dict(named(ctx))
    variables = from_environment(options, environment)
    path = given["config"] if on_command_line(ctx, "config") else variables.pop("config", (given["config"], ""))[0]
    pipeline, settings = from_file(options, path)
    values: dict[str, Any] = {**given, "config": pipeline or None}
    for name, option in options.items():
        key = option.name
        found = variables.get(name) or settings.get(name)
        if found is not None and key != "config" and not on_command_line(ctx, key):
            values[key] = read_value(ctx, option, *found)
    return values


def options_of(command: Any, read: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """The options of `graft serve`, the command, from a mapping alone, as from a file."""
    ctx = command.make_context("serve", [])
    pipeline, settings = from_mapping(dict(named(ctx)), read, where)
    values: dict[str, Any] = {**ctx.params, "config": pipeline or None}
    for name, option in named(ctx):
        if name in settings:
            values[option.name] = read_value(ctx, option, *settings[name])
    return {name: value for name, value in values.items() if name not in HERE_ALONE}


def named(ctx: typer.Context) -> Iterator[tuple[str, Any]]:
    """Every option by its name without dashes: max_model_len."""
    for option in ctx.command.params:
        long = [one for one in option.opts if one.startswith("--")] or option.opts
        name = long[0].removeprefix("--").replace("-", "_").lower()
        if name not in HERE_ALONE:
            yield name, option


def on_command_line(ctx: typer.Context, key: str) -> bool:
    return getattr(ctx.get_parameter_source(key), "name", "") == "COMMANDLINE"


def from_environment(options: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """By name: value and where it stands. An empty variable is none."""
    found: dict[str, tuple[Any, str]] = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or not text:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in options:
            raise UsageError(f"{variable}: there is no such option{near(name, options)}")
        found[name] = (as_list(text, variable) if takes_several(options[name]) else text, variable)
    return found


def takes_several(option: Any) -> bool:
    return bool(getattr(option, "multiple", False))


def as_list(text: str, where: str) -> object:
    """[a, b] is a list, anything else one value."""
    if not text.startswith("["):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{where}: a list is written as [a, b]: {error}") from error


def from_file(options: Mapping[str, Any], path: str | None) -> tuple[dict[str, Any], dict[str, tuple[Any, str]]]:
    """What it has for the pipeline, and by name: value and where it stands."""
    if path is None:
        return {}, {}
    read = read_yaml(Path(path))
    if not isinstance(read, Mapping):
        raise UsageError(f"config file {path} must be a mapping of options, not {type(read).__name__}")
    return from_mapping(options, read, f"config file {path}")


def from_mapping(
    options: Mapping[str, Any], read: Mapping[Any, Any], where: str
) -> tuple[dict[str, Any], dict[str, tuple[Any, str]]]:
    pipeline: dict[str, Any] = {}
    found: dict[str, tuple[Any, str]] = {}
    for key, value in read.items():
        name = str(key).replace("-", "_")
        if name in PIPELINE:
            pipeline[name] = value
        elif name not in options or name == "config":
            raise UsageError(f"{where}: unknown key {str(key)!r}{near(name, [*options, *PIPELINE])}")
        elif value is not None:
            found[name] = value, f"{where}: {key}"
    return pipeline, found


def read_value(ctx: typer.Context, option: Any, value: object, where: str) -> Any:
    """As the command line would have read it."""
    several = takes_several(option)
    given = value if isinstance(value, list) else [value]
    if isinstance(value, (Mapping, type(None))) or (isinstance(value, list) and not several):
        raise UsageError(f"{where}: takes {'a list of values' if several else 'one value'}, not {value!r}")
    flag = getattr(option, "is_flag", False)
    for one in given:
        if isinstance(one, bool) != flag and not isinstance(one, str):
            raise UsageError(f"{where}: takes {'true or false' if flag else 'no true or false'}, not {one!r}")
    texts = [one if isinstance(one, bool) else str(one) for one in given]
    try:
        return option.process_value(ctx, texts if several else texts[0])
    except typer.BadParameter as error:
        raise UsageError(f"{where}: {value!r} cannot be meant: {error.message}") from error
