"""From a request to an engine: out of a compiled one, out of the engine cache, or built and kept there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from graft.base.caches import note_use
from graft.base.errors import ArtifactError
from graft.engine.artifact.format import is_engine
from graft.engine.artifact.kept import KeptEngine, drop, keep_engine, kept_engine
from graft.engine.artifact.request import EngineRequest, Starter
from graft.engine.parts import EngineParts


def start_engine(request: EngineRequest, starter: Starter) -> EngineParts:
    if is_engine(request.model):
        return stored(Path(request.model), request, request.against_folder(), starter)
    kept = kept_engine(request)
    damaged = ""
    if kept.is_there:
        try:
            return from_cache(kept, request, starter)
        except ArtifactError as error:
            drop(kept)
            damaged = f"; what was kept could not be used: {error}"
    built = build(request, starter)
    return noted(built, keep_engine(kept, built, starter.progress) + damaged)


def from_cache(kept: KeptEngine, request: EngineRequest, starter: Starter) -> EngineParts:
    assert kept.path is not None
    said = f"engine cache: an engine that an earlier start kept ({kept.short})"
    parts = stored(kept.path, request, request.of_kept(), starter, said)
    note_use(kept.path)
    return parts


def stored(
    path: Path, request: EngineRequest, asked: Mapping[str, Any], starter: Starter, said: str = ""
) -> EngineParts:
    from graft.engine.artifact.load import load_engine

    return load_engine(path, request.sizes, asked, starter, said)


def build(request: EngineRequest, starter: Starter) -> EngineParts:
    from graft.engine.assemble import assemble
    from graft.engine.stages import load_decoder, settings_for
    from graft.passes.config import PipelineConfig, load_config, quantize_sets

    chosen = (*request.sets, *quantize_sets(request.quantize))
    if not isinstance(request.config, PipelineConfig):  # a wrong key is told before the model is loaded
        load_config(request.config, sets=chosen, plugins=request.plugins)
    loaded = load_decoder(
        request.model, dtype=request.dtype, device=request.device, backend=request.backend,
        quantize=request.quantize, kv_cache_dtype=request.sizes.kv_cache_dtype,
        trust_remote_code=request.trust_remote_code, progress=starter.progress,
    )  # fmt: skip
    sizes = starter.sizes(request.sizes, loaded)
    settings = settings_for(loaded, request.config, request.quantize, sets=request.sets, plugins=request.plugins)
    return assemble(
        loaded, sizes, settings, backend=request.backend, dump_dir=request.dump_dir, progress=starter.progress,
        keep_weights=bool(request.keep_weights),
    )  # fmt: skip


def noted(parts: EngineParts, note: str) -> EngineParts:
    """With one more note in its report."""
    report = parts.report
    return replace(parts, report=lambda: replace(report(), notes=(*report().notes, note)))
