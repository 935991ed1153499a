"""What an engine is asked for, before anything is loaded, and by whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graft.base.files import Progress
from graft.engine.options import EngineOptions
from graft.models.loaded import LoadedModel

if TYPE_CHECKING:
    from graft.engine.stages import Config


@dataclass(frozen=True)
class EngineRequest:
    """model: a name, folder or file. sizes: of these, the context and the cache's dtype are part of the graph.
    use_cache: an engine that an earlier start kept may serve, and this one is kept."""

    model: str | Path
    sizes: EngineOptions = EngineOptions()  # noqa: RUF009 (frozen)
    dtype: str = "auto"
    device: str = "auto"
    config: Config = None
    backend: str = "auto"
    dump_dir: str | Path | None = None
    quantize: str | None = None
    keep_weights: bool | None = None
    trust_remote_code: bool = False
    sets: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    use_cache: bool = True

    def against_folder(self) -> dict[str, Any]:
        """What a compiled engine is held against: it has its settings already."""
        names = ("dtype", "device", "backend", "dump_dir", "quantize", "keep_weights")
        return {name: getattr(self, name) for name in names} | {"config": self.config or list(self.sets) or None}

    def of_kept(self) -> Mapping[str, Any]:
        """The same for an engine that was kept for this very request, so that its key has all of it."""
        return self.against_folder() | {"config": None, "quantize": None, "keep_weights": None}


@dataclass(frozen=True)
class Starter:
    """Who starts an engine. sizes_for: more options, for those who must know the model first. tell: gets notes of
    loading at once."""

    sizes_for: Callable[[LoadedModel], Mapping[str, Any]] | None = None
    tell: Callable[[Sequence[str]], None] | None = None
    progress: Progress | None = None

    def sizes(self, sizes: EngineOptions, model: LoadedModel) -> EngineOptions:
        """Of the model that is now known, whose notes are told."""
        if self.tell:
            self.tell(model.notes)
        return replace(sizes, **self.sizes_for(model)) if self.sizes_for else sizes


SILENT = Starter()
