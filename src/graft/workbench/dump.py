"""Dumps of a run: the graph after every transform, as text and as JSON that loads back."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.fx import GraphModule

from graft.capture.decoder import capture_decoder
from graft.errors import DumpError
from graft.graph.serial import graph_from_json
from graft.models.files import Progress
from graft.models.load import load_model
from graft.models.registry import entries
from graft.transforms.base import Context
from graft.transforms.config import PipelineConfig
from graft.transforms.pipeline import run_pipeline
from graft.transforms.report import Report


def dump_model(
    name: str, folder: Path, config: PipelineConfig, dtype: str = "auto", progress: Progress | None = None
) -> Report:
    """Captures and transforms a model, writing every step to `folder`. Random-weight models stay without weights."""
    entry = entries().get(name)
    device = "meta" if entry is not None and entry.kind == "random" else "cpu"
    model = load_model(name, dtype=dtype, device=device, progress=progress)
    gm = capture_decoder(model.module)
    return run_pipeline(gm, config, Context(route="decoder"), model=model.name, dump_dir=folder)


def load_dump(path: str | Path, state: dict[str, torch.Tensor] | None = None) -> GraphModule:
    """A dumped graph as a module again. `state` gives its weights; without it they are on the meta device."""
    file = Path(path)
    try:
        return graph_from_json(file.with_suffix(".json").read_text(), state)
    except FileNotFoundError as error:
        raise DumpError(f"{file} does not exist; graft dump MODEL -o DIR writes dumps") from error
