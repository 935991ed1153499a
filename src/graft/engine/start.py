"""From a request to an engine: out of a compiled one, out of the engine cache, or built and kept there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from graft.base.errors import ArtifactError
from graft.base.files import Progress
from graft.engine.artifact.format import is_engine
from graft.engine.artifact.kept import KeptEngine, drop, keep_engine, kept_engine, was_used
from graft.engine.artifact.request import EngineRequest
from graft.engine.options import EngineOptions
from graft.engine.parts import EngineParts
from graft.models.loaded import LoadedModel

Sizes = Callable[[LoadedModel], Mapping[str, Any]]
Tell = Callable[[Sequence[str]], None]


def start_engine(
    request: EngineRequest,
    *,
    sizes_for: Sizes | None = None,
    tell: Tell | None = None,
    progress: Progress | None = None,
) -> EngineParts:
    """sizes_for: more options, for those who must know the model first. tell: gets notes of loading, at once."""
    if is_engine(request.model):
        return stored(Path(request.model), request, request.against_folder(), sizes_for, tell, progress)
    kept = kept_engine(request)
    damaged = ""
    if kept.is_there:
        try:
            return from_cache(kept, request, sizes_for, tell, progress)
        except ArtifactError as error:
            drop(kept)
            damaged = f"; what was kept could not be used: {error}"
    built = build(request, sizes_for, tell, progress)
    return noted(built, keep_engine(kept, built, progress) + damaged)


def from_cache(
    kept: KeptEngine,
    request: EngineRequest,
    sizes_for: Sizes | None,
    tell: Tell | None,
    progress: Progress | None,
) -> EngineParts:
    assert kept.path is not None
    said = f"engine cache: an engine that an earlier start kept ({kept.short})"
    parts = stored(kept.path, request, request.of_kept(), sizes_for, tell, progress, said)
    was_used(kept)
    return parts


def stored(
    path: Path,
    request: EngineRequest,
    asked: Mapping[str, Any],
    sizes_for: Sizes | None,
    tell: Tell | None,
    progress: Progress | None,
    said: str = "",
) -> EngineParts:
    from graft.engine.artifact.load import load_engine, loaded_model

    sizes = request.sizes
    if sizes_for or tell:
        about = loaded_model(path)
        sizes = sized(sizes, about, sizes_for)
        if tell:
            tell(about.notes)
    return load_engine(path, sizes, asked, progress, said)


def build(
    request: EngineRequest, sizes_for: Sizes | None, tell: Tell | None, progress: Progress | None
) -> EngineParts:
    from graft.engine.assemble import assemble
    from graft.engine.stages import load_decoder, settings_for
    from graft.passes.config import PipelineConfig, load_config, quantize_sets

    chosen = (*request.sets, *quantize_sets(request.quantize))
    if not isinstance(request.config, PipelineConfig):  # a wrong key is told before the model is loaded
        load_config(request.config, sets=chosen, plugins=request.plugins)
    loaded = load_decoder(
        request.model, dtype=request.dtype, device=request.device, backend=request.backend,
        quantize=request.quantize, kv_cache_dtype=request.sizes.kv_cache_dtype,
        trust_remote_code=request.trust_remote_code, progress=progress,
    )  # fmt: skip
    if tell:
        tell(loaded.notes)
    settings = settings_for(loaded, request.config, request.quantize, sets=request.sets, plugins=request.plugins)
    return assemble(
        loaded, sized(request.sizes, loaded, sizes_for), settings, backend=request.backend,
        dump_dir=request.dump_dir, progress=progress, keep_weights=bool(request.keep_weights),
    )  # fmt: skip


def sized(sizes: EngineOptions, model: LoadedModel, sizes_for: Sizes | None) -> EngineOptions:
    return replace(sizes, **sizes_for(model)) if sizes_for else sizes


def noted(parts: EngineParts, note: str) -> EngineParts:
    """With one more note in its report."""
    report = parts.report
    return replace(parts, report=lambda: replace(report(), notes=(*report().notes, note)))
