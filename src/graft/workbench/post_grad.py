"""A captured model through Inductor's FX passes, without code: what fix_functionalization does to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.api.functionalization import FixRecorder
from graft.backends import InductorSettings
from graft.backends.inductor import inductor_patches, post_grad_backend, reset_compiler
from graft.backends.inductor_caches import without_caches
from graft.ir.nodes import output_node, placeholders, val
from graft.passes.config import PipelineConfig


def fix_on_post_grad(gm: GraphModule, config: PipelineConfig, folder: Path | None = None) -> FixRecorder:
    """Compiles the graph as far as Inductor's post-grad graph, on zeros of the sizes that it was captured with."""
    recorder = FixRecorder(folder, config)
    options = inductor_patches(InductorSettings(observer=recorder.key))
    backend = post_grad_backend(options, lambda *_: None, zeros_of_results)
    inputs = [example(val(node)) for node in placeholders(gm.graph)]
    reset_compiler()
    try:
        with without_caches(), torch.no_grad():
            torch.compile(gm, backend=backend, dynamic=True)(*inputs)
    finally:
        reset_compiler()
    return recorder


def zeros_of_results(gm: GraphModule) -> Callable[..., Any]:
    """In place of running it: nobody looks at the results, and torch 2.11 leaves sizes in it that no node gives."""
    nodes = output_node(gm.graph).args[0]
    values = [val(node) if isinstance(node, Node) else node for node in nodes]  # type: ignore[union-attr]
    return lambda *_: [example(value) for value in values]


def example(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros([example(size) for size in value.shape], dtype=value.dtype, device=value.device)
    return int(value.node.hint) if isinstance(value, torch.SymInt) else value
