"""`graft compile`: a model as a folder that starts without compiling anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from graft.cli.documents import print_json
from graft.cli.load import load_llm
from graft.cli.options import (
    Backend,
    CacheDtype,
    ConfigFile,
    Device,
    DType,
    Json,
    MaxModelLen,
    Model,
    Plugins,
    Quantize,
    Sets,
    TensorParallel,
    TrustRemoteCode,
)

WithWeights = Annotated[
    bool, typer.Option("--with-weights", help="Weights too that could stay in the model's own folder.")
]


def compile(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.", metavar="DIR")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a compiled engine that is there.")] = False,
    dtype: DType = "auto",
    device: Device = "auto",
    backend: Backend = "auto",
    config: ConfigFile = None,
    sets: Sets = None,
    plugins: Plugins = None,
    quantize: Quantize = None,
    kv_cache_dtype: CacheDtype = "auto",
    max_model_len: MaxModelLen = None,
    tensor_parallel: TensorParallel = None,
    trust_remote_code: TrustRemoteCode = False,
    with_weights: WithWeights = False,
    as_json: Json = False,
) -> None:
    """Compile a model into a folder that run, chat, serve and bench start from in a moment.

    It holds the graph, the kernels, the weights as kernels read them (but those that lie so in the model's own
    folder: they stay there, see --with-weights) and the tokenizer. It starts on a machine of
    this kind with this graft and torch; elsewhere it is refused with what differs.
    """
    from graft.base.errors import UsageError
    from graft.cli.show import progress_bar
    from graft.engine.artifact.format import is_engine
    from graft.engine.artifact.request import EngineRequest
    from graft.engine.artifact.save import check_place
    from graft.engine.options import EngineOptions

    if is_engine(model):
        raise UsageError(f"{model} is a compiled engine already; copy the folder, or compile the model itself")
    check_place(output, overwrite)  # told before the model is loaded
    with progress_bar() as progress:
        llm = load_llm(
            model, progress, dtype=dtype, device=device, config=config, sets=sets, plugins=plugins, backend=backend,
            quantize=quantize, kv_cache_dtype=kv_cache_dtype, max_model_len=max_model_len,
            trust_remote_code=trust_remote_code, use_cache=False, tensor_parallel_size=tensor_parallel,
        )  # fmt: skip
        asked = EngineRequest(
            model, EngineOptions(kv_cache_dtype=kv_cache_dtype, max_model_len=max_model_len), dtype, device, config,
            backend, quantize=quantize, trust_remote_code=trust_remote_code, sets=tuple(sets or ()),
            plugins=tuple(plugins or ()), with_weights=with_weights, tensor_parallel_size=tensor_parallel,
        )  # fmt: skip
        llm.save(output, overwrite=overwrite, made_by=asked.command(), with_weights=with_weights, progress=progress)
    show(output, llm, as_json)


def show(output: Path, llm: Any, as_json: bool) -> None:
    from graft.base.device_memory import size_text
    from graft.base.manifest import MANIFEST
    from graft.cli.show import out
    from graft.engine.artifact.format import ranks_of

    files = json.loads((output / MANIFEST).read_text())["files"]
    size = sum(entry["bytes"] for entry in files.values())
    ranks = ranks_of(output)
    on_ranks = f" on {ranks} ranks" if ranks > 1 else ""
    if as_json:
        about = {"folder": str(output), "bytes": size, "backend": llm.backend, "device": str(llm.device)}
        print_json("compile", {**about, "files": {name: entry["bytes"] for name, entry in files.items()}})
        return
    out.print(
        f"{output}: {llm.model.name} for {llm.device} ({llm.backend}{on_ranks}), {len(files)} files,"
        f" {size_text(size)}; graft run -m {output} …", markup=False, soft_wrap=True,
    )  # fmt: skip
