"""graft.LLM: a model by name, folder or file, ready to generate."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graft.base.errors import UsageError, near
from graft.base.files import Progress
from graft.engine.artifact.request import EngineRequest, Starter
from graft.engine.frontend import Frontend
from graft.engine.kv.events import Event
from graft.engine.kv.subscription import EventSubscription
from graft.engine.options import EngineOptions
from graft.engine.ranks.leader import LeaderGraph
from graft.engine.setup.parts import EngineParts
from graft.engine.start import refuse_loaded, start_engine
from graft.models.loaded import LoadedModel

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from graft.engine.setup.stages import Config
    from graft.passes.report import Report


class LLM(Frontend):
    """Loads, captures, transforms and lowers a decoder, and generates with it; or starts a compiled engine, from the
    folder that `save` or `graft compile` wrote, without any of that. `options`: see EngineOptions.

    quantize: "int8", "int4" or "fp8", the transform quantize_linear; None: floats, but for a GGUF file with
    `dtype="auto"` and the native backend, which reads the file's own blocks; "none": floats always. Where the LLM
    loaded the model itself, it frees the weights that were quantized, or packed for native kernels, and
    `llm.model.module` refuses to run; a LoadedModel of the caller keeps them. keep_weights says it either way; of a
    file's own blocks it makes a second, dequantised copy. trust_remote_code: Python code that comes with a model's
    folder may run; without it, it never does. use_cache: an engine that an earlier start of the same request kept
    may serve; nothing is captured or compiled then (engine/artifact/kept.py). recompile: a compiled engine that is
    for another graft, torch or machine is made anew in its folder, by the command that made it; otherwise it is
    refused. tensor_parallel_size: so many processes compute the model together, each with its part of the weights and
    of the cache (docs/scale.md); this one is rank 0, and ends the others. None: one, or as many as an engine was
    compiled for.
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
        use_cache: bool = True,
        recompile: bool = False,
        tensor_parallel_size: int | None = None,
        **options: Any,
    ) -> None:
        sizes = engine_options(options)
        if isinstance(model, LoadedModel):
            if tensor_parallel_size not in (None, 1):
                refuse_loaded(tensor_parallel_size)
            from graft.engine.setup.assemble import assemble
            from graft.engine.setup.stages import settings_for

            settings, keep = settings_for(model, config, quantize), keep_weights is None or keep_weights
            parts = assemble(
                model, sizes, settings, backend=backend, keep_weights=keep, dump_dir=dump_dir, progress=progress
            )
        else:
            request = EngineRequest(
                model, sizes, dtype, device, config, backend, dump_dir, quantize, keep_weights, trust_remote_code,
                use_cache=use_cache, recompile=recompile, tensor_parallel_size=tensor_parallel_size,
            )  # fmt: skip
            parts = start_engine(request, Starter(progress=progress))
        self.take(parts)

    @classmethod
    def of(cls, parts: EngineParts) -> LLM:
        """Of an engine that was started already."""
        made = cls.__new__(cls)
        made.take(parts)
        return made

    def take(self, parts: EngineParts) -> None:
        self.parts: EngineParts = parts
        self.engine, self.size, self.model, self.cache = parts.engine, parts.size, parts.model, parts.cache
        self.device, self.backend, self.quantized = parts.device, parts.backend, parts.quantized
        if isinstance(parts.engine.graph, LeaderGraph):
            weakref.finalize(self, parts.engine.graph.close)

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
        with_weights: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Writes a folder that starts without compiling anything: `graft.LLM(path)`, `graft run -m path`.

        It starts on the same kind of machine with the same graft and torch, on as many ranks as this. made_by: the
        command that would make it anew, for those who find that it does not. with_weights: without it, weights that
        lie in the model's own folder as kernels read them stay there, if they are most of them.
        """
        from graft.engine.artifact.save import save_engine

        on_ranks = isinstance(self.engine.graph, LeaderGraph)
        with self.driver.held() if on_ranks else nullcontext():  # other ranks write between two steps
            save_engine(
                self.parts, Path(path), overwrite=overwrite, made_by=tuple(made_by), with_weights=with_weights,
                progress=progress,
            )  # fmt: skip

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
