"""A captured model through Inductor's FX passes, without code: what fix_functionalization does to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from graft.api.functionalization import FixRecorder
from graft.backends import InductorSettings
from graft.backends.inductor import inductor_patches, post_grad_backend, reset_compiler
from graft.backends.inductor_caches import without_caches
from graft.ir.nodes import placeholders, val
from graft.passes.config import PipelineConfig


def fix_on_post_grad(gm: GraphModule, config: PipelineConfig, folder: Path | None = None) -> FixRecorder:
    """Compiles the graph as far as Inductor's post-grad graph, on zeros of the sizes that it was captured with."""
    recorder = FixRecorder(folder, config)
    backend = post_grad_backend(inductor_patches(InductorSettings(observer=recorder.key)), lambda *_: None)
    inputs = [example(val(node)) for node in placeholders(gm.graph)]
    reset_compiler()
    try:
        with without_caches(), torch.no_grad():
            torch.compile(gm, backend=backend, dynamic=True)(*inputs)
    finally:
        reset_compiler()
    return recorder


def example(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros([example(size) for size in value.shape], dtype=value.dtype, device=value.device)
    return int(value.node.hint) if isinstance(value, torch.SymInt) else value
