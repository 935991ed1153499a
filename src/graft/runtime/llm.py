"""graft.LLM: a model by name, folder or file, ready to generate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from graft.backends.select import decoder_backend, lower_decoder
from graft.capture.cache import captured_decoder
from graft.errors import UsageError, near
from graft.files import Progress
from graft.graph.edit import attribute
from graft.kvcache.events import Event
from graft.kvcache.layout import check_graph
from graft.kvcache.tensors import LayerShape
from graft.models.load import LoadedModel, load_model, resolve_device
from graft.ops.fused_linear.file_rows import Held
from graft.runtime.build import build_engine, fingerprint
from graft.runtime.choices import choice_notes
from graft.runtime.frontend import Frontend
from graft.runtime.options import EngineOptions
from graft.runtime.self_check import self_check
from graft.transforms.base import Context
from graft.transforms.config import DEFAULTS, Layer, PipelineConfig, flatten, load_config, quantize_sets, with_sets
from graft.transforms.pipeline import run_pipeline
from graft.transforms.quantization import Saving, release
from graft.transforms.report import Report


class LLM(Frontend):
    """Loads, captures, transforms and lowers a decoder, and generates with it. `options`: see EngineOptions.

    quantize: "int8", "int4" or "fp8", the transform quantize_linear; None: floats, but for a GGUF file with
    `dtype="auto"` and the native backend, which reads the file's own blocks; "none": floats always. Where the LLM
    loaded the model itself, it gives up the weights that were quantized, or packed for native kernels, and
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
        config: str | Path | Mapping[str, Any] | PipelineConfig | None = None,
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
        self.model = given or load_model(
            model,  # pyrefly: ignore
            dtype=dtype, device=device, progress=progress, in_blocks=in_blocks(backend, quantize, dtype, device),
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        self.model = replace(self.model, context=sizes.context(self.model.context))
        held, settings = self.model.held, settings_for(self.model, config, quantize)
        keep = given is not None if keep_weights is None else keep_weights
        keep = keep and held is None
        self.graph_module, captured = captured_decoder(self.model.module, progress)
        owned = None if keep else self.model.module
        self.device = next(self.model.module.parameters()).device
        chosen, why = decoder_backend(backend, self.device, self.model.module.dtype, weight_formats(settings))
        context = Context(route="decoder", backend=chosen, context_length=self.model.context, owned=owned, held=held)
        context.notes += filled(
            held, self.graph_module, "verify: matches computes with them", settings.verify == "matches"
        )
        report = run_pipeline(
            self.graph_module,
            settings,
            context,
            model=self.model.name,
            dump_dir=dump_dir,
            progress=transform_progress(progress),
        )
        check_graph(self.graph_module.graph)
        dequantised = filled(held, self.graph_module, "the graph reads them as floats")
        content = fingerprint(self.model, self.graph_module)
        give_up = None if owned is None else partial(release, self.graph_module, owned)
        lowered = lower_decoder(self.graph_module, chosen, settings.kernels, asked=backend, release=give_up)
        self.backend = lowered.backend
        layers = [LayerShape(c.kv_heads, c.head_dim, c.dtype) for c in context.outputs["kv_cache"]]
        self.engine, self.size = build_engine(
            lowered.call, self.model, layers, context.block_size, sizes, self.graph_module, backend=lowered.backend,
            progress=progress, content=content,
        )  # fmt: skip
        names, formats = context.outputs["kv_cache_layers"], weight_formats(settings)
        checked = self_check(self.engine, self.model, names, quantized=bool(formats), wanted=sizes.self_check)
        self.quantized: Saving | None = context.outputs.get("quantized")
        if keep_weights and self.model.floats is not None:
            self.model = replace(self.model, module=self.model.floats(), held=None, floats=None)
        choices = choice_notes(self.graph_module, self.device, lowered.kernels)
        notes = (*self.model.notes, captured, *why, *report.notes, *dequantised, *lowered.notes, *choices, checked)
        self.built: Report = replace(report, kernels=lowered.kernels, notes=notes)

    def kv_cache_events(self, timeout: float | None = None) -> list[Event]:
        """What happened in the cache since the last call; waits up to `timeout` seconds for something to happen."""
        events = self.engine.manager.events
        return events.drain(timeout) if events is not None else []

    @property
    def report(self) -> Report:
        """What was built, with what the engine has had to say since."""
        return replace(self.built, notes=(*self.built.notes, *self.engine.notes, self.size))


def settings_for(
    model: LoadedModel, config: str | Path | Mapping[str, Any] | PipelineConfig | None, quantize: str | None
) -> PipelineConfig:
    """The configuration of the model, the caller and `quantize`; weights in a file's blocks stay so by default."""
    if isinstance(config, PipelineConfig):
        settings = with_sets(config, quantize_sets(quantize))
    else:
        settings = load_config(config, model=overlay(model), sets=quantize_sets(quantize))
    if model.held is not None and no_format_asked(settings):
        settings = with_sets(settings, quantize_sets("file"))
    require_cache(settings)
    return settings


def no_format_asked(settings: PipelineConfig) -> bool:
    """Nobody says whether weights are to be quantized: those of a file may stay as they are in it."""
    return settings.origins["transforms.quantize_linear.enabled"] == DEFAULTS.name


def weight_formats(settings: PipelineConfig) -> tuple[str, ...]:
    """What linear layers and the head are quantized to."""
    chosen: Any = settings.transforms["quantize_linear"]
    return (chosen.format, chosen.head_format) if chosen.enabled else ()


def in_blocks(backend: str, quantize: str | None, dtype: str, device: str) -> bool:
    """Whether the weights of a GGUF file stay in its blocks, for the native backend: nobody asks for floats."""
    if quantize is not None or dtype != "auto":
        return False
    return decoder_backend(backend, resolve_device(device), torch.float32)[0] == "native"


def filled(held: Held | None, gm: GraphModule, why: str, wanted: bool = True) -> list[str]:
    """Dequantises what of a file the graph's parameters stand for; a line for the report."""
    if held is None or not wanted:
        return []
    read = [attribute(gm, str(node.target)) for node in gm.graph.nodes if node.op == "get_attr"]
    done = held.fill_all(tensor for tensor in read if isinstance(tensor, Tensor))
    return [f"weights: {len(done)} of the file's were dequantised, because {why}"] if done else []


def engine_options(options: Mapping[str, Any]) -> EngineOptions:
    known = EngineOptions.__dataclass_fields__
    for name in options:
        if name not in known:
            raise UsageError(f"unknown option {name!r} of LLM{near(name, known)}")
    return EngineOptions(**options)


def overlay(model: LoadedModel) -> Layer | None:
    """The family's settings as a configuration layer."""
    if not model.transforms or model.family is None:
        return None
    name = f"registry/{model.family.name}.yaml"
    return Layer(name, flatten({"transforms": model.transforms}, name))


def require_cache(config: PipelineConfig) -> None:
    for name in ("last_token_logits", "insert_kv_cache"):
        if name not in config.transforms or not config.transforms[name].enabled:
            raise UsageError(
                f"the engine needs the transform {name}; enable it, or use graft.compile without an engine"
            )


def transform_progress(progress: Progress | None) -> Progress | None:
    if progress is None:
        return None
    return lambda name, done, total: progress(f"transform {name}" if name else "transforms done", done, total)
