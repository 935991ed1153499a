"""Dumps of a run: the graph after every transform, as text and as JSON that loads back."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.fx import GraphModule

from graft.errors import DumpError
from graft.files import Progress
from graft.graph.serial import graph_from_json
from graft.transforms.base import Context
from graft.transforms.config import PipelineConfig
from graft.transforms.pipeline import run_pipeline
from graft.transforms.report import Report
from graft.workbench.model import captured


def dump_model(
    name: str, folder: Path, config: PipelineConfig, dtype: str = "auto", progress: Progress | None = None
) -> Report:
    """Captures and transforms a model, writing every step to `folder`. Random-weight models stay without weights."""
    model, gm = captured(name, dtype, progress)
    return run_pipeline(
        gm, config, Context(route="decoder", context_length=model.context), model=model.name, dump_dir=folder
    )


def load_dump(path: str | Path, state: dict[str, torch.Tensor] | None = None) -> GraphModule:
    """A dumped graph as a module again. `state` gives its weights; without it they are on the meta device."""
    file = Path(path)
    try:
        return graph_from_json(file.with_suffix(".json").read_text(), state)
    except FileNotFoundError as error:
        raise DumpError(f"{file} does not exist; graft dump MODEL -o DIR writes dumps") from error
