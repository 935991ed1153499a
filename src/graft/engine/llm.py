"""graft.LLM: a model by name, folder or file, ready to generate."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graft.base.errors import RankFailed, UsageError, near
from graft.base.files import Progress
from graft.dist.sizes import check_size
from graft.engine.artifact.format import is_engine
from graft.engine.engine import Engine
from graft.engine.frontend import Frontend
from graft.engine.kv.events import Event
from graft.engine.kv.subscription import EventSubscription
from graft.engine.options import EngineOptions
from graft.engine.parts import EngineParts
from graft.engine.ranks.leader import LeaderGraph
from graft.models.loaded import LoadedModel

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from graft.engine.stages import Config
    from graft.passes.report import Report


class LLM(Frontend):
    """Loads, captures, transforms and lowers a decoder, and generates with it; or starts a compiled engine, from the
    folder that `save` or `graft compile` wrote, without any of that. `options`: see EngineOptions.

    quantize: "int8", "int4" or "fp8", the transform quantize_linear; None: floats, but for a GGUF file with
    `dtype="auto"` and the native backend, which reads the file's own blocks; "none": floats always. Where the LLM
    loaded the model itself, it frees the weights that were quantized, or packed for native kernels, and
    `llm.model.module` refuses to run; a LoadedModel of the caller keeps them. keep_weights says it either way; of a
    file's own blocks it makes a second, dequantised copy. trust_remote_code: Python code that comes with a model's
    folder may run; without it, it never does. tensor_parallel_size: so many processes compute the model together,
    each with its part of the weights and of the cache (docs/scale.md); this one is rank 0, and ends the others.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        dtype: str = "auto",
        device: str = "auto",
        config: Config = None,
        backend: str = "auto",
        dump_dir: str | Path | None = None,
        progress: Progress | None = None,
        quantize: str | None = None,
        keep_weights: bool | None = None,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        **options: Any,
    ) -> None:
        sizes = engine_options(options)
        asked: dict[str, Any] = {
            "dtype": dtype, "device": device, "config": config, "backend": backend, "dump_dir": dump_dir,
            "quantize": quantize, "keep_weights": keep_weights, "trust_remote_code": trust_remote_code,
        }  # fmt: skip
        check_size(tensor_parallel_size)
        if tensor_parallel_size > 1:
            parts = self.on_ranks(model, sizes, asked, tensor_parallel_size, progress)
        elif is_engine(model):
            from graft.engine.artifact.load import load_engine

            parts = load_engine(Path(str(model)), sizes, asked, progress)
        else:
            from graft.engine.assemble import assemble

            parts = assemble(model, sizes, progress=progress, **asked)
        self.parts: EngineParts = parts
        self.engine, self.size, self.model, self.cache = parts.engine, parts.size, parts.model, parts.cache
        self.device, self.backend, self.quantized = parts.device, parts.backend, parts.quantized

    def on_ranks(
        self, model: Any, sizes: EngineOptions, asked: Mapping[str, Any], world: int, progress: Progress | None
    ) -> EngineParts:
        """The engine of rank 0, with the others in processes of their own; they end with this LLM."""
        if isinstance(model, LoadedModel) or is_engine(model):
            what = "a model that is loaded already" if isinstance(model, LoadedModel) else "a compiled engine"
            raise UsageError(
                f"tensor_parallel_size={world}: every rank loads its part, of a name or folder, not {what}"
            )
        if asked["keep_weights"]:
            raise UsageError(
                f"tensor_parallel_size={world}: every rank keeps its part of the weights, not all of them"
            )
        from graft.engine.launch.start import close_ranks, start_ranks
        from graft.engine.ranks.task import RankTask

        parts = start_ranks(RankTask(str(model), sizes, asked), world, progress)
        leader = parts.engine.graph
        assert isinstance(leader, LeaderGraph)
        if leader.workers is not None:
            leader.workers.on_failure = partial(rank_lost, parts.engine, leader)
        weakref.finalize(self, close_ranks, leader)
        return parts

    @cached_property
    def graph_module(self) -> GraphModule:
        """The transformed graph; of a compiled engine on the native backend without its weights."""
        return self.parts.graph_module()

    @cached_property
    def built(self) -> Report:
        return self.parts.report()

    def save(
        self,
        path: str | Path,
        *,
        overwrite: bool = False,
        made_by: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> None:
        """Writes a folder that starts without compiling anything: `graft.LLM(path)`, `graft run -m path`.

        It holds the weights, and starts on the same kind of machine with the same graft and torch. made_by: the
        command that would make it anew, for those who find that it does not.
        """
        from graft.engine.artifact.save import save_engine

        if isinstance(self.engine.graph, LeaderGraph):
            raise UsageError("an engine on several ranks cannot be saved: each rank has its part; save it with one")
        save_engine(self.parts, Path(path), overwrite=overwrite, made_by=tuple(made_by), progress=progress)

    def kv_cache_events(self, timeout: float | None = None) -> list[Event]:
        """What happened in the cache since the last call; waits up to `timeout` seconds for something to happen."""
        events = self.engine.manager.events
        return events.drain(timeout) if events is not None else []

    def on_kv_cache_events(self, callback: Callable[[list[Event]], Any]) -> EventSubscription:
        """Calls `callback(events)` from a thread of its own whenever something happens in the cache, until `close()`
        or until nobody has this LLM any more.

        It begins with the present state. Those who poll get all events as well.
        """
        events = self.engine.manager.events
        if events is None:
            raise UsageError("this engine's cache tells of no events")
        subscription = EventSubscription(events, callback)
        weakref.finalize(self, subscription.end)
        return subscription

    @property
    def report(self) -> Report:
        """What was built, with what the engine has had to say since."""
        ranks = (self.engine.graph.note,) if isinstance(self.engine.graph, LeaderGraph) else ()
        return replace(self.built, notes=(*self.built.notes, *self.engine.notes, *ranks, self.size))


def engine_options(options: Mapping[str, Any]) -> EngineOptions:
    known = EngineOptions.__dataclass_fields__
    for name in options:
        if name not in known:
            raise UsageError(f"unknown option {name!r} of LLM{near(name, known)}")
    return EngineOptions(**options)


def rank_lost(engine: Engine, leader: LeaderGraph, failed: RankFailed) -> None:
    """Told by the thread that watches the workers: nothing more is taken, also where nothing was running."""
    leader.gone(failed)
    engine.broken = failed
