"""What a model's graph, or a saved module, takes, keeps and gives: `graft explain MODEL`."""

from __future__ import annotations

from pathlib import Path

from graft.api.load import load_compiled
from graft.base.files import Progress
from graft.base.manifest import MANIFEST
from graft.ir.io.pytrees import nesting, result_names
from graft.ir.nodes import placeholders
from graft.memory.alias_map import state_records
from graft.memory.io_table import IoNames, IoTable, io_table
from graft.passes.base import Context
from graft.passes.config import PipelineConfig
from graft.passes.pipeline import run_pipeline
from graft.workbench.model import captured


def io_of(
    name: str,
    config: PipelineConfig,
    dtype: str = "auto",
    progress: Progress | None = None,
    *,
    trust_remote_code: bool = False,
) -> IoTable:
    """Of the engine's graph of a model, after the pipeline, or of the folder that `compiled.save` wrote."""
    if (Path(name) / MANIFEST).is_file():
        return load_compiled(name).signature
    model, gm = captured(name, dtype, progress, trust_remote_code=trust_remote_code)
    run_pipeline(gm, config, Context(route="decoder", context_length=model.context), model=model.name)
    inputs = {node: str(node.target) for node in placeholders(gm.graph)}
    info = nesting(gm.graph)
    names = IoNames(inputs, result_names(info.out_spec) if info is not None else ["result"])
    aliases, _ = state_records(gm, inputs, {})
    return io_table(gm, names, aliases, {})
