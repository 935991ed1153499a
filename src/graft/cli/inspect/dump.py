"""`graft dump`: the graph after every transform, on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from graft.cli.documents import print_json
from graft.cli.options import ConfigFile, DType, Json, Plugins, Sets, TrustRemoteCode


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
        bool,
        typer.Option(
            "--native", help="The graphs of the native backend, and its C++: native.cpp, or printed without a folder."
        ),
    ] = False,
    inductor: Annotated[
        bool, typer.Option("--inductor", help="Also Inductor's graph around fix_functionalization: DIR/inductor.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every match numerically: run it beside what it replaced.")
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
    from graft.cli.show import out, print_pipeline, progress_bar
    from graft.passes.config import load_config
    from graft.workbench.dump import dump_model
    from graft.workbench.native import NATIVE, native_source

    if output is None and not native:
        raise UsageError("dump writes into a folder: name it with --output DIR; --native alone prints the C++")
    given = [*(sets or ()), *(["verify=matches"] if verify else [])]
    settings = load_config(config, sets=given, plugins=tuple(plugins or ()))
    with progress_bar() as progress:
        if output is None:
            source = native_source(model, settings, dtype, progress, trust_remote_code=trust_remote_code)
            if as_json:
                print_json("dump-native", {"model": model, "native": source})
            else:
                print(source)
            return
        report = dump_model(
            model, output, settings, dtype, progress, weights=weights, fold=fold, native=native,
            inductor=inductor, trust_remote_code=trust_remote_code,
        )  # fmt: skip
    if as_json:
        print_json("dump", json.loads(report.to_json()))
        return
    print_pipeline(report)
    out.print(f"{len(list(output.glob('*.txt'))) - 1} graphs in {output}", markup=False)
    if inductor:
        graph = output / "inductor" / "graph_0"
        out.print(f"graft diff {graph} --transform fix_functionalization shows what that one did", markup=False)
    if native:
        out.print(f"the native step in {output / NATIVE}", markup=False)
