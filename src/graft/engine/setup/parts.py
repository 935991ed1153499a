"""What an LLM is made of, however it came about: built from a checkpoint, or read from an artifact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from graft.engine.engine import Engine
from graft.engine.kv.tensors import CachedTensor, LayerShape, cached_tensors
from graft.models.loaded import LoadedModel
from graft.ops.packed_states import StateShape
from graft.weights.quantize import Saving

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from graft.passes.report import Report


@dataclass(frozen=True)
class CacheLayout:
    """The cache that the graph was made for, and what a cached block depends on beside its tokens."""

    layers: tuple[LayerShape, ...]
    names: tuple[str, ...]
    block_size: int
    content: str
    states: tuple[StateShape, ...] = ()  # of recurrent layers
    state_names: tuple[str, ...] = ()

    def tensors(self) -> list[CachedTensor]:
        return cached_tensors(self.layers, self.names)


@dataclass(frozen=True)
class EngineParts:
    """size: the cache's, for the report. report: without the engine's own notes. lasting: notes of it that hold
    wherever and whenever this graph runs. lowered: None where it was read from an artifact. kept_at: where it lies in
    graft's cache, if it came from there. command: that would compile it anew, where one is known."""

    engine: Engine
    model: LoadedModel
    device: torch.device
    backend: str
    size: str
    cache: CacheLayout
    graph_module: Callable[[], GraphModule]
    report: Callable[[], Report]
    quantized: Saving | None = None
    quantized_weights: bool = False
    kernels: Mapping[str, str] = field(default_factory=dict)  # that the configuration names
    settings: Any = None  # the PipelineConfig
    lowered: Any = None
    lasting: tuple[str, ...] = ()
    kept_at: Path | None = None
    command: tuple[str, ...] = ()
