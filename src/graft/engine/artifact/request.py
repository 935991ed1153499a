"""What an engine is asked for, before anything is loaded, and by whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graft.base.files import Progress
from graft.engine.options import EngineOptions
from graft.models.loaded import LoadedModel
from graft.models.registry import entries

if TYPE_CHECKING:
    from graft.engine.setup.stages import Config

WORDS = ("dtype", "device", "backend", "config", "quantize")  # of `graft compile`, as here
FLAGS = ("trust_remote_code", "with_weights")
RANKS = "tensor-parallel"
SIZES = ("kv_cache_dtype", "max_model_len")  # and of EngineOptions


@dataclass(frozen=True)
class EngineRequest:
    """model: a name, folder or file. sizes: of these, the context and the cache's dtype are part of the graph.
    use_cache: an engine that an earlier start kept may serve, and this one is kept. recompile: a compiled engine that
    is for another place is made anew where it lies. with_weights: of what is compiled, see save_engine.
    tensor_parallel_size: ranks that each have a part of it; every one of them gets this request. None: one, or those
    that an engine was compiled for."""

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
    recompile: bool = False
    with_weights: bool = False
    tensor_parallel_size: int | None = None

    def command(self) -> tuple[str, ...]:
        """What would compile it anew from any folder, but for where it goes: `compile MODEL --dtype=…`; nothing for a
        configuration that no file holds."""
        if self.config is not None and not isinstance(self.config, (str, Path)):
            return ()
        model = str(self.model) if str(self.model) in entries() else str(Path(self.model).resolve())
        values = {name.replace("_", "-"): getattr(self, name) for name in WORDS}
        values["config"] = None if self.config is None else str(Path(self.config).resolve())
        values |= {name.replace("_", "-"): getattr(self.sizes, name) for name in SIZES}
        given = [f"--{name}={value}" for name, value in values.items() if value not in (None, "auto")]
        if self.tensor_parallel_size not in (None, 1):
            given.append(f"--{RANKS}={self.tensor_parallel_size}")
        repeated = [f"--set={text}" for text in self.sets] + [f"--plugin={name}" for name in self.plugins]
        flags = [f"--{name.replace('_', '-')}" for name in FLAGS if getattr(self, name)]
        return ("compile", model, *given, *repeated, *flags)

    @classmethod
    def of_command(cls, words: Sequence[str]) -> EngineRequest:
        """The reverse; raises ValueError for what `command` does not write."""
        _, model, *options = words
        found: dict[str, Any] = {"sets": (), "plugins": ()}
        sizes: dict[str, Any] = {}
        for word in options:
            name, equals, value = word.removeprefix("--").partition("=")
            if name == RANKS:
                found["tensor_parallel_size"] = int(value)
                continue
            name = name.replace("-", "_")
            if name in ("set", "plugin"):
                found[f"{name}s"] += (value,)
            elif name in SIZES:
                sizes[name] = int(value) if name == "max_model_len" else value
            elif (name in WORDS and equals) or (name in FLAGS and not equals):
                found[name] = value if equals else True
            else:
                raise ValueError(f"{word!r} is no option of graft compile")
        return cls(model, EngineOptions(**sizes), **found)

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
