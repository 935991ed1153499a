"""`graft dump`: the graph after every transform, on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graft.cli.options import ConfigFile, DType, Json, Plugins, Sets


def dump(
    model: Annotated[str, typer.Argument(help="Registry name, folder or .gguf file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the dumps.", metavar="DIR")],
    weights: Annotated[
        bool, typer.Option("--weights", help="Also the weights of every step, so that the graphs can be run.")
    ] = False,
    fold: Annotated[bool, typer.Option("--fold", help="Show equal layers once in the text.")] = False,
    dtype: DType = "auto",
    config: ConfigFile = None,
    sets: Sets = None,
    plugins: Plugins = None,
    as_json: Json = False,
) -> None:
    """Capture and transform a model, and write the graph after every step as text and JSON."""
    from graft.cli.show import out, print_pipeline, progress_bar
    from graft.transforms.config import load_config
    from graft.workbench.dump import dump_model

    settings = load_config(config, sets=sets or (), plugins=tuple(plugins or ()))
    with progress_bar() as progress:
        report = dump_model(model, output, settings, dtype, progress, weights=weights, fold=fold)
    if as_json:
        print(report.to_json())
        return
    print_pipeline(report)
    out.print(f"{len(list(output.glob('*.txt'))) - 1} graphs in {output}", markup=False)
