"""Inputs for a dumped graph: of the recorded shapes and dtypes, sizes as in the example."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from graft.base.errors import ExportRefused, ShapesUnknown
from graft.ir.evaluate import example_size, fill
from graft.ir.nodes import calls, placeholders, tensor_val, val, where

LAYOUT = (
    "graft::paged_attention",
    "graft::cached_attention",
    "graft::rope_attention",
    "graft::paged_latent_attention",
)


def made_up_arguments(gm: GraphModule) -> list[torch.Tensor]:
    """One tensor for each input; whole numbers are 0 or 1, which is valid as an index of anything."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for node in placeholders(gm.graph):
        value = tensor_val(node)
        if value is None and isinstance(val(node), (int, torch.SymInt)):
            raise ExportRefused(f"{where(node)} is a number, not a tensor; such a graph is exported from Python")
        if value is None:
            raise ShapesUnknown(where(node))
        made.append(fill([example_size(size, node) for size in value.shape], value.dtype, "random", generator))
    return made


def dynamic_dims(gm: GraphModule) -> tuple[dict[int, Any], ...]:
    """For each input the dims whose size is known at run time only."""
    dynamic = torch.export.Dim.DYNAMIC
    return tuple(
        {i: dynamic for i, size in enumerate(value.shape) if isinstance(size, torch.SymInt)}
        for node in placeholders(gm.graph)
        if (value := tensor_val(node)) is not None
    )


def needs_layout(gm: GraphModule) -> str:
    """Why made-up inputs are no inputs of this graph, or ''."""
    for node in calls(gm.graph):
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.name in LAYOUT:
            return f"{where(node)} reads a batch's layout in the cache"
    return ""
