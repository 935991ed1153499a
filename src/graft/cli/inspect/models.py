"""`graft models`: what can be loaded by name."""

from __future__ import annotations

from typing import Annotated

import typer

from graft.cli.documents import print_json
from graft.cli.options import Json


def models(
    markdown: Annotated[bool, typer.Option(help="Print the families and their expected matches instead.")] = False,
    as_json: Json = False,
) -> None:
    """List the models of the registry."""
    if markdown and as_json:
        from graft.base.errors import UsageError

        raise UsageError("--markdown and --json are two forms of output; choose one")
    if markdown:
        from graft.workbench.families import families_markdown

        print(families_markdown(), end="")
        return
    from rich.table import Table

    from graft.base.files import cache_dir
    from graft.cli.show import out
    from graft.models.registry import entries

    rows = []
    for entry in entries().values():
        layers = entry.settings.get("num_hidden_layers", entry.settings.get("n_layer"))
        cached = entry.kind == "embedded" and (cache_dir() / "models" / entry.name).is_dir()
        weights = (
            entry.kind
            if entry.kind == "random"
            else f"real, {'in the cache' if cached else 'downloaded on first use'}"
        )
        rows.append({"name": entry.name, "family": entry.family.name, "layers": layers, "weights": weights})
    if as_json:
        print_json("models", rows)
        return
    table = Table()
    for column in ("model", "family", "layers", "weights"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["name"], row["family"], str(row["layers"] or ""), row["weights"])
    out.print(table)
    out.print("A Hugging Face folder or a .gguf file can be named instead.")
