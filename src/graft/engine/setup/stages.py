"""From a checkpoint to a lowered decoder, one function a stage; LLM calls them one after another.

load_decoder   a name, folder or file → LoadedModel
settings_for   the defaults, the family's overlay and what the caller asks for → PipelineConfig
capture        the module → its graph
transform      the graph → fewer, larger ops over a paged cache, with a Report
lower          the graph → what a backend runs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from graft.backends.lowered import Lowered
from graft.backends.select import decoder_backend, lower_decoder
from graft.base.errors import NoFloat8, UsageError
from graft.base.files import Progress
from graft.base.progress import LOWERING, TRANSFORMS, Doing
from graft.capture.cache import captured_decoder
from graft.engine.kv.tensors import LayerShape
from graft.engine.setup.build import fingerprint
from graft.ir.edit import attribute
from graft.ir.verify import GraphSnapshot
from graft.models.load import load_model
from graft.models.loaded import LoadedModel
from graft.models.places import resolve_device
from graft.ops.launch import float8_missing
from graft.ops.layout import check_graph
from graft.ops.packed_states import StateShape
from graft.passes.base import BaseTransform, Context
from graft.passes.config import DEFAULTS, ConfigLayer, PipelineConfig, flatten, load_config, quantize_sets, with_sets
from graft.passes.library.quantize.quantization import release
from graft.passes.pipeline import run_pipeline
from graft.passes.report import Report, TransformRecord
from graft.weights.lazy import LazyWeights
from graft.weights.quantize import FP8, Saving, fp8_problem

Config = str | Path | Mapping[str, Any] | PipelineConfig | None


@dataclass(frozen=True)
class Target:
    """What a decoder is built for. `asked`: the backend by name, as the caller said it; `why`: for the report."""

    device: torch.device
    backend: str
    asked: str
    why: tuple[str, ...]


@dataclass(frozen=True)
class CapturedDecoder:
    graph_module: GraphModule
    note: str


@dataclass(frozen=True)
class Transformed:
    """The graph after the pipeline, and what the engine must know of it."""

    graph_module: GraphModule
    report: Report
    layers: tuple[LayerShape, ...]  # of the cache
    layer_names: tuple[str, ...]
    states: tuple[StateShape, ...]  # of recurrent layers
    state_names: tuple[str, ...]
    block_size: int
    content: str  # what a cached block depends on beside its tokens
    quantized: Saving | None
    notes: tuple[str, ...]


def load_decoder(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    backend: str = "auto",
    quantize: str | None = None,
    kv_cache_dtype: str = "auto",
    trust_remote_code: bool = False,
    headless: bool = False,
    ranks: int = 1,
    progress: Progress | None = None,
) -> LoadedModel:
    """A GGUF file's weights stay in its blocks where the native backend reads them so, and nobody asks for floats."""
    as_stored = quantize is None and dtype == kv_cache_dtype == "auto"
    blocks = decoder_backend(backend, resolve_device(device), torch.float32)[0] == "native" and as_stored
    return load_model(
        model, dtype=dtype, device=device, progress=progress, in_blocks=blocks, trust_remote_code=trust_remote_code,
        headless=headless, ranks=ranks,
    )  # fmt: skip


def settings_for(
    model: LoadedModel,
    config: Config,
    quantize: str | None = None,
    *,
    sets: Sequence[str] = (),
    plugins: Sequence[str] = (),
) -> PipelineConfig:
    """The configuration of the model, the caller and `quantize`; weights in a file's blocks stay so by default."""
    if isinstance(config, PipelineConfig):
        settings = with_sets(config, (*sets, *quantize_sets(quantize)))
    else:
        chosen = (*sets, *quantize_sets(quantize))
        settings = load_config(config, model=overlay(model), sets=chosen, plugins=tuple(plugins))
    if model.lazy is not None and model.lazy.parts and no_format_asked(settings):
        settings = with_sets(settings, quantize_sets("file"))
    require_cache(settings)
    return settings


def target_of(model: LoadedModel, settings: PipelineConfig, backend: str, cache: torch.dtype | None = None) -> Target:
    """cache: the dtype that was asked for its keys and values."""
    device = next(model.module.parameters()).device
    chosen, why = decoder_backend(backend, device, model.module.dtype, weight_formats(settings), cache)
    return Target(device, chosen, backend, why)


def cache_dtype_of(asked: str, device: torch.device) -> torch.dtype | None:
    """`auto` → None, as keys and values are computed; `fp8` → float8, where device and kernels can be relied on."""
    if asked == "auto":
        return None
    missing = fp8_problem(device) or float8_missing(device)
    if missing is not None:
        raise NoFloat8(device, missing)
    return FP8


def capture(model: LoadedModel, progress: Progress | None = None) -> CapturedDecoder:
    return CapturedDecoder(*captured_decoder(model.module, progress))


def transform(
    model: LoadedModel,
    captured: CapturedDecoder,
    settings: PipelineConfig,
    target: Target,
    *,
    keep_weights: bool,
    cache_dtype: torch.dtype | None = None,
    dump_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Transformed:
    """Runs the pipeline over the captured graph, which is changed. keep_weights: the module keeps its own.
    cache_dtype: of keys and values in the cache; None: as they are computed."""
    gm, lazy = captured.graph_module, model.lazy
    owned = None if keep_weights else model.module
    context = Context(
        route="decoder", backend=target.backend, context_length=model.context, owned=owned, lazy=lazy,
        kv_cache_dtype=cache_dtype,
    )  # fmt: skip
    if settings.verify == "matches":
        context.notes += filled(lazy, gm, "verify: matches computes with them")
    report = run_pipeline(
        gm, settings, context, model=model.name, dump_dir=dump_dir, progress=transform_progress(progress),
        observe=None if owned is None else partial(free_cut_weights, owned, context),
    )  # fmt: skip
    check_graph(gm.graph)
    notes = filled(lazy, gm, "the graph reads them as floats")
    layers = tuple(LayerShape(c.kv_heads, c.head_dim, c.dtype, c.tensors) for c in context.outputs["kv_cache"])
    return Transformed(
        gm,
        report,
        layers=layers,
        layer_names=context.outputs["kv_cache_layers"],
        states=context.outputs.get("state_cache", ()),
        state_names=context.outputs.get("state_cache_layers", ()),
        block_size=context.block_size,
        content=fingerprint(model, gm, cache_dtype, latent=any(layer.tensors == 1 for layer in layers)),
        quantized=context.outputs.get("quantized"),
        notes=tuple(notes),
    )


def free_cut_weights(
    owned: torch.nn.Module,
    context: Context,
    gm: GraphModule,
    _: GraphSnapshot,
    transform: BaseTransform,
    record: TransformRecord,
) -> TransformRecord:
    """A rank keeps its parts of the weights, and gives up the rest as soon as the parts are checked."""
    if transform.name == "shard_tensor_parallel":
        read = {str(node.target) for node in gm.graph.nodes if node.op == "get_attr" and node.users}
        gone = [name for name in context.outputs["sharded"] if name not in read]
        if context.lazy is not None:
            context.lazy.drop(*(attribute(gm, name) for name in gone))
        release(gm, owned, *gone)
    return record


def lower(
    model: LoadedModel, made: Transformed, settings: PipelineConfig, target: Target, *, keep_weights: bool
) -> Lowered:
    """What the backend runs; weights that it has packed are freed unless the module keeps its own."""
    free = None if keep_weights else partial(release, made.graph_module, model.module)
    return lower_decoder(made.graph_module, target.backend, settings.kernels, asked=target.asked, release=free)


def no_format_asked(settings: PipelineConfig) -> bool:
    """Nobody says whether weights are to be quantized: those of a file may stay as they are in it."""
    return settings.origins["transforms.quantize_linear.enabled"] == DEFAULTS.name


def weight_formats(settings: PipelineConfig) -> tuple[str, ...]:
    """What linear layers and the head are quantized to."""
    chosen: Any = settings.transforms["quantize_linear"]
    return (chosen.format, chosen.head_format) if chosen.enabled else ()


def filled(lazy: LazyWeights | None, gm: GraphModule, why: str) -> list[str]:
    """Reads all of what the graph's parameters stand for in a file, as floats; a line for the report."""
    if lazy is None:
        return []
    read = [attribute(gm, str(node.target)) for node in gm.graph.nodes if node.op == "get_attr"]
    done = lazy.fill_all(tensor for tensor in read if isinstance(tensor, Tensor))
    return [f"weights: {len(done)} of the file's were read whole, because {why}"] if done else []


def overlay(model: LoadedModel) -> ConfigLayer | None:
    """The family's settings as a configuration layer."""
    if not model.transforms or model.family is None:
        return None
    name = f"registry/{model.family.name}.yaml"
    return ConfigLayer(name, flatten({"transforms": model.transforms}, name))


def require_cache(config: PipelineConfig) -> None:
    for name in ("last_token_logits", "insert_kv_cache", "insert_state_cache"):
        if name not in config.transforms or not config.transforms[name].enabled:
            raise UsageError(
                f"the engine needs the transform {name}; enable it, or use graft.compile without an engine"
            )


def transform_progress(progress: Progress | None) -> Progress | None:
    """Of the pipeline, which names a transform, or none when it is through."""
    if progress is None:
        return None

    def report(name: str, done: int, total: int) -> None:
        doing = Doing(f"transform {name}", TRANSFORMS) if name else Doing("transforms done", LOWERING)
        progress(doing, done, total)

    return report
