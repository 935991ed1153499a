"""graft.LLM: a model by name, folder or file, ready to generate."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from graft.base.errors import UsageError, near
from graft.base.files import Progress
from graft.engine.build import build_engine
from graft.engine.cache_error import cache_error_text
from graft.engine.choices import choice_notes
from graft.engine.frontend import Frontend
from graft.engine.kv.events import Event
from graft.engine.kv.subscription import EventSubscription
from graft.engine.options import EngineOptions
from graft.engine.self_check import self_check
from graft.engine.stages import (
    Config,
    cache_dtype_of,
    capture,
    load_decoder,
    lower,
    settings_for,
    target_of,
    transform,
    weight_formats,
)
from graft.models.load import LoadedModel
from graft.passes.config import quantize_sets
from graft.passes.report import Report


class LLM(Frontend):
    """Loads, captures, transforms and lowers a decoder, and generates with it. `options`: see EngineOptions.

    quantize: "int8", "int4" or "fp8", the transform quantize_linear; None: floats, but for a GGUF file with
    `dtype="auto"` and the native backend, which reads the file's own blocks; "none": floats always. Where the LLM
    loaded the model itself, it frees the weights that were quantized, or packed for native kernels, and
    `llm.model.module` refuses to run; a LoadedModel of the caller keeps them. keep_weights says it either way; of a
    file's own blocks it makes a second, dequantised copy. trust_remote_code: Python code that comes with a model's
    folder may run; without it, it never does.
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
        **options: Any,
    ) -> None:
        sizes, given = engine_options(options), model if isinstance(model, LoadedModel) else None
        quantize_sets(quantize)  # a wrong format is told before the model is loaded
        loaded = given or load_decoder(
            model,  # pyrefly: ignore
            dtype=dtype, device=device, backend=backend, quantize=quantize, kv_cache_dtype=sizes.kv_cache_dtype,
            trust_remote_code=trust_remote_code, progress=progress,
        )  # fmt: skip
        loaded = replace(loaded, context=sizes.context(loaded.context))
        settings = settings_for(loaded, config, quantize)
        cache = cache_dtype_of(sizes.kv_cache_dtype, next(loaded.module.parameters()).device)
        target = target_of(loaded, settings, backend, cache)
        keep = (given is not None if keep_weights is None else keep_weights) and loaded.lazy is None
        captured = capture(loaded, progress)
        made = transform(
            loaded,
            captured,
            settings,
            target,
            keep_weights=keep,
            cache_dtype=cache,
            dump_dir=dump_dir,
            progress=progress,
        )
        lowered = lower(loaded, made, settings, target, keep_weights=keep)
        self.engine, self.size = build_engine(
            lowered.call, loaded, made.layers, made.block_size, sizes, made.graph_module, backend=lowered.backend,
            progress=progress, content=made.content,
        )  # fmt: skip
        quantized = bool(weight_formats(settings))
        checked = self_check(self.engine, loaded, made.layer_names, quantized=quantized, wanted=sizes.self_check)
        if cache is not None and sizes.self_check:
            checked += f"; {cache_error_text(self.engine, loaded, lowered.backend)}"
        if keep_weights and loaded.floats is not None:
            loaded = replace(loaded, module=loaded.floats(), lazy=None, floats=None)
        self.model, self.device, self.backend = loaded, target.device, lowered.backend
        self.graph_module, self.quantized = made.graph_module, made.quantized
        notes = (
            *loaded.notes, captured.note, *target.why, *made.report.notes, *made.notes, *lowered.notes,
            *choice_notes(made.graph_module, target.device, lowered.kernels), checked,
        )  # fmt: skip
        self.built: Report = replace(made.report, kernels=lowered.kernels, notes=notes)

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
        return replace(self.built, notes=(*self.built.notes, *self.engine.notes, self.size))


def engine_options(options: Mapping[str, Any]) -> EngineOptions:
    known = EngineOptions.__dataclass_fields__
    for name in options:
        if name not in known:
            raise UsageError(f"unknown option {name!r} of LLM{near(name, known)}")
    return EngineOptions(**options)
