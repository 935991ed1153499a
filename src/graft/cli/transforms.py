"""`graft transforms`: what there is, in the order it runs."""

from __future__ import annotations

import json
from typing import Any

from graft.cli.options import ConfigFile, Json, Plugins, Sets


def transforms(config: ConfigFile = None, sets: Sets = None, plugins: Plugins = None, as_json: Json = False) -> None:
    """List the transforms: stage, order, on or off, and what each does."""
    from rich.table import Table

    from graft.cli.show import out
    from graft.passes.config import load_config
    from graft.passes.pipeline import order_transforms
    from graft.passes.registry import TransformRegistry

    settings = load_config(config, sets=sets or (), plugins=tuple(plugins or ()))
    rows: list[dict[str, Any]] = []
    for order, name in enumerate(order_transforms(settings), start=1):
        entry = settings.transforms[name]
        about = (TransformRegistry.get(name).__doc__ or "").strip().splitlines()[0]
        rows.append(
            {
                "order": order,
                "stage": entry.stage.value,
                "name": name,
                "enabled": entry.enabled,
                "about": about,
            }
        )
    if as_json:
        print(json.dumps(rows))
        return
    table = Table()
    for column in ("", "stage", "transform", "on", "what it does"):
        table.add_column(column)
    for row in rows:
        table.add_row(str(row["order"]), row["stage"], row["name"], "on" if row["enabled"] else "off", row["about"])
    out.print(table)
