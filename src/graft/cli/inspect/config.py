"""`graft config`: the configuration that would run, and where each value came from."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from typing import Annotated, Any

import typer

from graft.cli.documents import print_json
from graft.cli.options import ConfigFile, Json, Plugins, Sets


def config(
    config: ConfigFile = None,
    sets: Sets = None,
    plugins: Plugins = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Include this registry model's overlay.")] = None,
    as_json: Json = False,
) -> None:
    """Print the configuration after all overlays, with the origin of every value."""
    from graft.passes.config import ConfigLayer, flatten, load_config

    layer = None
    if model is not None:
        from graft.base.errors import UnknownModel
        from graft.models.registry import entries

        if model not in entries():
            raise UnknownModel(model, entries())
        family = entries()[model].family
        where = f"registry/{family.name}.yaml"
        layer = (
            ConfigLayer(where, flatten({"transforms": dict(family.transforms)}, where)) if family.transforms else None
        )
    settings = load_config(config, model=layer, sets=sets or (), plugins=tuple(plugins or ()))
    if as_json:
        values = {
            name: {k: plain(v) for k, v in asdict(entry).items()} for name, entry in settings.transforms.items()
        }
        chosen = {"verify": settings.verify, "kernels": dict(settings.kernels)}
        print_json("config", {**chosen, "transforms": values, "origins": dict(settings.origins)})
        return
    print(f"{f'verify: {settings.verify}':<44} # {settings.origins.get('verify', 'built in')}")
    print("kernels:" if settings.kernels else "kernels: {}")
    for op, kernel in settings.kernels.items():
        print(f"  {f'{op}: {kernel}':<42} # {settings.origins[f'kernels.{op}']}")
    print("transforms:")
    for name, entry in settings.transforms.items():
        print(f"  {name}:")
        for key, value in asdict(entry).items():
            origin = settings.origins.get(f"transforms.{name}.{key}", "built in")
            print(f"    {f'{key}: {json.dumps(plain(value))}':<40} # {origin}")


def plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else list(value) if isinstance(value, tuple) else value
