"""An engine of a request, built anew: loaded, with its settings, captured, transformed and lowered."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from graft.engine.artifact.request import EngineRequest, Starter
from graft.engine.setup.parts import EngineParts

if TYPE_CHECKING:
    from graft.dist.workers import Workers
    from graft.engine.ranks.task import RankPlace

BUILDING = threading.Lock()  # torch.export and Dynamo keep state of the process: engines are built one after another


def check_settings(request: EngineRequest) -> None:
    """A wrong key or format is told before a model is loaded, or a process started."""
    from graft.passes.config import PipelineConfig, load_config, quantize_sets

    chosen = (*request.sets, *quantize_sets(request.quantize))
    if not isinstance(request.config, PipelineConfig):
        load_config(request.config, sets=chosen, plugins=request.plugins)


def build(
    request: EngineRequest, starter: Starter, place: RankPlace | None = None, workers: Workers | None = None
) -> EngineParts:
    """place, workers: see assemble."""
    check_settings(request)
    with BUILDING:
        return built(request, starter, place, workers)


def built(request: EngineRequest, starter: Starter, place: RankPlace | None, workers: Workers | None) -> EngineParts:
    from graft.engine.setup.assemble import assemble
    from graft.engine.setup.stages import load_decoder, settings_for

    loaded = load_decoder(
        request.model, dtype=request.dtype, device=request.device, backend=request.backend,
        quantize=request.quantize, ranks=1 if place is None else place.world,
        kv_cache_dtype=request.sizes.kv_cache_dtype, trust_remote_code=request.trust_remote_code,
        headless=request.sizes.runner == "pooling", progress=starter.progress,
    )  # fmt: skip
    sizes = starter.sizes(request.sizes, loaded)
    settings = settings_for(loaded, request.config, request.quantize, sets=request.sets, plugins=request.plugins)
    made = assemble(
        loaded, sizes, settings, backend=request.backend, dump_dir=request.dump_dir, progress=starter.progress,
        keep_weights=bool(request.keep_weights), place=place, workers=workers,
    )  # fmt: skip
    return replace(made, command=request.command())
