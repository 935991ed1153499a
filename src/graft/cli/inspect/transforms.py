"""`graft transforms`: what there is, in the order it runs, and where it comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graft.cli.documents import print_json
from graft.cli.options import ConfigFile, Json, Plugins, Sets

if TYPE_CHECKING:
    from graft.passes.config import PipelineConfig


def transforms(config: ConfigFile = None, sets: Sets = None, plugins: Plugins = None, as_json: Json = False) -> None:
    """List the transforms: stage, order, on or off, the package that each comes from, and what it does."""
    from graft.passes.config import load_config

    rows = rows_of(load_config(config, sets=sets or (), plugins=tuple(plugins or ())))
    if as_json:
        print_json("transforms", rows)
    else:
        show(rows)


def rows_of(settings: PipelineConfig) -> list[dict[str, Any]]:
    """In the order they run; behind them those that are registered, and that no configuration lists."""
    from graft.passes.pipeline import order_transforms
    from graft.passes.registry import TransformRegistry, origin_of

    rows: list[dict[str, Any]] = []
    ordered = order_transforms(settings)
    ordered += [name for name in settings.transforms if name not in ordered]  # on Inductor's graph
    for order, name in enumerate([*ordered, *(n for n in TransformRegistry.names() if n not in ordered)], start=1):
        entry = settings.transforms.get(name)
        about = (TransformRegistry.get(name).__doc__ or "").strip().splitlines() or [""]
        rows.append(
            {
                "order": order if entry else None,
                "stage": entry.stage.value if entry else None,
                "name": name,
                "enabled": bool(entry and entry.enabled),
                "about": about[0],
                "from": origin_of(name),
                "listed": settings.origins[f"transforms.{name}.stage"] if entry else None,
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from graft.cli.show import out

    table = Table()
    for column in ("", "stage", "transform", "on"):
        table.add_column(column, no_wrap=True)
    origins = list(dict.fromkeys(row["from"] for row in rows))
    if len(origins) > 1:
        table.add_column("from", no_wrap=True)
    table.add_column("what it does")
    for row in rows:
        on = "on" if row["enabled"] else "off" if row["order"] else "unlisted"
        cells = [str(row["order"] or ""), row["stage"] or "", row["name"], on]
        table.add_row(*cells, *([row["from"].partition(" ")[0]] if len(origins) > 1 else []), row["about"])
    out.print(table)
    out.print(f"from {', '.join(origins)}", markup=False, soft_wrap=True)
    for row in (row for row in rows if not row["order"]):
        out.print(
            f"{row['name']} never runs: nothing lists it. Give it a stage in the YAML beside it, or with --config"
            f" (transforms.{row['name']}.stage)",
            markup=False,
            soft_wrap=True,
        )
