"""graft.compile: any nn.Module through the pipeline, with the signature and results it had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from graft.backends import lower
from graft.graph.trace import export_graph
from graft.transforms.base import Context
from graft.transforms.config import PipelineConfig, load_config
from graft.transforms.pipeline import run_pipeline
from graft.transforms.report import Report


class CompiledModule(torch.nn.Module):
    """A module that calls its transformed graph. State is shared with the module it was made from."""

    def __init__(self, graph_module: torch.fx.GraphModule, call: Any, report: Report, backend: str) -> None:
        super().__init__()
        self.graph_module = graph_module
        self.report = report
        self.backend = backend
        self._call = call

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def compile(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    config: str | Path | Mapping[str, Any] | PipelineConfig | None = None,
    backend: str = "auto",
    dump_dir: str | Path | None = None,
) -> CompiledModule:
    """Captures `module` with example inputs, transforms the graph and lowers it.

    Sizes are fixed to the example's unless `dynamic_shapes` (as for torch.export) frees them.
    """
    settings = config if isinstance(config, PipelineConfig) else load_config(config)
    gm = export_graph(module, args, kwargs, dynamic_shapes)
    report = run_pipeline(gm, settings, Context(route="module"), model=type(module).__name__, dump_dir=dump_dir)
    lowered = lower(gm, backend)
    report = replace(report, kernels=lowered.kernels, notes=(*report.notes, *lowered.notes))
    return CompiledModule(gm, lowered.call, report, lowered.backend)
