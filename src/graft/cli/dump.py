"""`graft dump`: the graph after every transform, on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.options import ConfigFile, DType, Json, Plugins, Sets, TrustRemoteCode

if TYPE_CHECKING:
    from graft.passes.config import PipelineConfig


def dump(
    model: Annotated[str, typer.Argument(help="Registry name, folder or .gguf file.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the dumps.", metavar="DIR")
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Also the weights of every step, so that the graphs can be run.")
    ] = False,
    fold: Annotated[bool, typer.Option("--fold", help="Show equal layers once in the text.")] = False,
    native: Annotated[
        bool, typer.Option("--native", help="The C++ of the native backend: native.cpp, or printed without a folder.")
    ] = False,
    dtype: DType = "auto",
    config: ConfigFile = None,
    sets: Sets = None,
    plugins: Plugins = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Capture and transform a model, and write the graph after every step as text and JSON."""
    from graft.base.errors import UsageError
    from graft.base.files import write_whole
    from graft.cli.show import out, print_pipeline, progress_bar
    from graft.passes.config import load_config
    from graft.workbench.dump import dump_model

    if output is None and not native:
        raise UsageError("dump writes into a folder: name it with --output DIR; --native alone prints the C++")
    settings = load_config(config, sets=sets or (), plugins=tuple(plugins or ()))
    source = native_text(model, settings, dtype, trust_remote_code) if native else None
    if output is None:
        print(json.dumps({"model": model, "native": source}) if as_json else source)
        return
    with progress_bar() as progress:
        report = dump_model(
            model, output, settings, dtype, progress, weights=weights, fold=fold, trust_remote_code=trust_remote_code
        )
    if source is not None:
        write_whole(output / "native.cpp", source)
    if as_json:
        print(report.to_json())
        return
    print_pipeline(report)
    out.print(f"{len(list(output.glob('*.txt'))) - 1} graphs in {output}", markup=False)
    if source is not None:
        out.print(f"the native step in {output / 'native.cpp'}", markup=False)


def native_text(model: str, settings: PipelineConfig, dtype: str, trusted: bool) -> str:
    from graft.cli.show import progress_bar
    from graft.workbench.native import native_source

    with progress_bar() as progress:
        return native_source(model, settings, dtype, progress, trust_remote_code=trusted)
