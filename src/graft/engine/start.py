"""From a request to an engine: out of a compiled one, out of the engine cache, or built and kept there."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from graft.base.caches import note_use
from graft.base.errors import ArtifactError, OtherTarget, UsageError
from graft.dist.launcher import launched
from graft.dist.sizes import check_size
from graft.engine.artifact.format import EngineFolder, is_engine, ranks_of
from graft.engine.artifact.kept import KeptEngine, drop, files_changed, keep_engine, kept_engine
from graft.engine.artifact.request import SIZES, EngineRequest, Starter
from graft.engine.fresh import build, check_settings
from graft.engine.ranks.leader import LeaderGraph
from graft.engine.setup.parts import EngineParts


def start_engine(request: EngineRequest, starter: Starter) -> EngineParts:
    if request.tensor_parallel_size is not None:
        check_size(request.tensor_parallel_size)
    if is_engine(request.model):
        if request.sizes.runner == "pooling":
            raise UsageError(f'{request.model} is a compiled engine, which generates; runner="pooling" takes a model')
        return from_folder(Path(request.model), request, starter)
    if request.recompile:
        raise UsageError(f"recompile (--recompile) is for compiled engines, and {request.model} is none")
    if (request.tensor_parallel_size or 1) > 1:
        return on_ranks(request, starter)
    kept = kept_engine(request)
    damaged = ""
    if kept.is_there:
        try:
            return from_cache(kept, request, starter)
        except (ArtifactError, OSError) as error:
            drop(kept)
            damaged = f"; what was kept could not be used: {error}"
    built = build(request, starter)
    note = keep_engine(kept, built, starter.progress)
    if kept.is_there and files_changed(kept, request):
        drop(kept)
        note = "engine cache: not kept, because the model's files or the configuration changed while it was built"
    return noted(built, note + damaged)


def on_ranks(request: EngineRequest, starter: Starter) -> EngineParts:
    """The engine of rank 0, with the others in processes of their own."""
    world = request.tensor_parallel_size
    if request.keep_weights:
        raise UsageError(f"tensor_parallel_size={world}: every rank keeps its part of the weights, not all of them")
    from graft.engine.launch.start import start_ranks

    check_settings(request)
    return start_ranks(replace(request, use_cache=False), starter)


def refuse_loaded(world: int) -> NoReturn:
    raise UsageError(
        f"tensor_parallel_size={world}: every rank loads its part, of a name or folder, not a model that is loaded"
        " already"
    )


def ranks_asked(model: str | Path, asked: int | None) -> int:
    """How many ranks will compute a model: those that it was compiled for, or as many as are asked for."""
    return ranks_of(Path(model)) if is_engine(model) else asked or 1


def from_folder(path: Path, request: EngineRequest, starter: Starter) -> EngineParts:
    world, asked = ranks_of(path), request.tensor_parallel_size
    if asked not in (None, world):
        ranks = f"{world} ranks" if world > 1 else "one rank"
        raise UsageError(
            f"{path} was compiled for {ranks}, not for {asked}; leave tensor_parallel_size (--tensor-parallel) out,"
            f" or compile the model again: graft compile MODEL -o DIR --tensor-parallel {asked}"
        )
    request = replace(request, tensor_parallel_size=world)
    try:
        return stored(path, request, request.against_folder(), starter)
    except OtherTarget as error:
        if not request.recompile:
            raise
        return recompiled(path, request, starter, error.differences)


def recompiled(path: Path, request: EngineRequest, starter: Starter, differences: str) -> EngineParts:
    """By the command that made it, in its place, and said aloud."""
    from graft.engine.artifact.save import save_engine

    made_by = made_by_of(path)
    if not made_by:
        raise ArtifactError(path, f"cannot be recompiled: a program saved it, and not graft compile ({differences})")
    try:
        again = EngineRequest.of_command(made_by)
    except ValueError as error:
        raise ArtifactError(path, f"cannot be recompiled: it was made by {' '.join(made_by)} ({error})") from error
    if launched() is not None and again.tensor_parallel_size:
        raise UsageError(
            f"--recompile is for ranks that graft starts; compile {path} before: graft {shlex.join(made_by)}"
        )
    note = f"recompiled {path}: {differences}; as by graft {' '.join(made_by)}"
    if starter.tell:
        starter.tell((note,))
    own = {name: getattr(again.sizes, name) for name in SIZES}
    start = on_ranks if again.tensor_parallel_size else build
    built = start(replace(again, sizes=replace(request.sizes, **own), use_cache=False), starter)
    save_engine(
        built, path, overwrite=True, made_by=made_by, with_weights=again.with_weights, progress=starter.progress
    )
    if isinstance(built.engine.graph, LeaderGraph):
        built.engine.graph.close()
    del built
    return noted(stored(path, request, request.against_folder(), starter), note)


def made_by_of(path: Path) -> tuple[str, ...]:
    opened = EngineFolder(path)
    opened.close()
    return tuple(opened.manifest["made_by"])


def from_cache(kept: KeptEngine, request: EngineRequest, starter: Starter) -> EngineParts:
    assert kept.path is not None
    said = f"engine cache: an engine that an earlier start kept ({kept.short})"
    parts = stored(kept.path, request, request.of_kept(), starter, said)
    note_use(kept.path)
    return replace(parts, command=request.command())


def stored(
    path: Path, request: EngineRequest, asked: Mapping[str, Any], starter: Starter, said: str = ""
) -> EngineParts:
    from graft.engine.artifact.load import check_stored, load_engine

    if request.plugins:  # the graph may call ops of theirs
        from graft.passes.registry import load_all

        load_all(request.plugins)
    if (request.tensor_parallel_size or 1) > 1:
        from graft.engine.launch.start import start_ranks

        device = check_stored(path, request.sizes, asked)  # told before a process is started
        return start_ranks(replace(request, use_cache=False, device=device), starter)
    return load_engine(path, request.sizes, asked, starter, said)


def noted(parts: EngineParts, note: str) -> EngineParts:
    """With one more note in its report."""
    report = parts.report
    return replace(parts, report=lambda: replace(report(), notes=(*report().notes, note)))
