"""From a loaded model to the parts of an LLM: capture, transform, lower, build, check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from graft.base.files import Progress
from graft.base.kernel_cache import record as record_kernels
from graft.dist.sizes import check_heads
from graft.dist.workers import Workers
from graft.engine.options import EngineOptions
from graft.engine.ranks.leader import lead
from graft.engine.ranks.task import RankPlace
from graft.engine.setup.build import build_engine, fingerprint
from graft.engine.setup.cache_error import cache_error_text
from graft.engine.setup.choices import choice_notes
from graft.engine.setup.parts import CacheLayout, EngineParts
from graft.engine.setup.self_check import self_check
from graft.engine.setup.stages import (
    cache_dtype_of,
    capture,
    lower,
    target_of,
    transform,
    weight_formats,
)
from graft.ir.nodes import calls, is_op
from graft.models.loaded import LoadedModel
from graft.models.pooling import Pooling, pooling_of
from graft.passes.config import PipelineConfig, pooling_sets, shard_sets, with_sets

ROUTERS = (torch.ops.graft.moe_route.default, torch.ops.graft.moe_experts.default)


def assemble(
    loaded: LoadedModel,
    sizes: EngineOptions,
    settings: PipelineConfig,
    *,
    backend: str,
    keep_weights: bool,
    dump_dir: str | Path | None = None,
    progress: Progress | None = None,
    place: RankPlace | None = None,
    workers: Workers | None = None,
) -> EngineParts:
    """keep_weights: the module can still run afterwards, which takes weights of its own. place: of one of several
    ranks, whose part this is. workers: the processes of the others, on rank 0."""
    pooling = pooling_of(loaded) if sizes.runner == "pooling" else None
    loaded = replace(loaded, context=sizes.context(longest_prompt(loaded, pooling)))
    settings = of_rank(settings, loaded, place)
    if pooling is not None:
        settings = with_sets(settings, pooling_sets())
    cache = cache_dtype_of(sizes.kv_cache_dtype, next(loaded.module.parameters()).device)
    target = target_of(loaded, settings, backend, cache)
    keep = keep_weights and loaded.lazy is None
    if target.device.type == "cuda":
        record_kernels()
    captured = capture(loaded, progress)
    made = transform(
        loaded, captured, settings, target, keep_weights=keep, cache_dtype=cache, dump_dir=dump_dir, progress=progress
    )
    lowered = lower(loaded, made, settings, target, keep_weights=keep)
    engine, size = build_engine(
        lowered.call, loaded, made.layers, made.block_size, sizes, target.device, backend=lowered.backend,
        progress=progress, content=made.content, states=made.states, place=place, pooling=pooling,
    )  # fmt: skip
    lead(engine, place, workers)
    quantized = bool(weight_formats(settings))
    wanted = sizes.self_check and (place is None or place.rank == 0)
    layout = CacheLayout(made.layers, made.layer_names, made.block_size, made.content, made.states, made.state_names)
    routed = any(is_op(node, *ROUTERS) for node in calls(made.graph_module.graph))
    checked = self_check(
        engine, loaded, layout.tensors(), layout.state_names, quantized=quantized, routed=routed, wanted=wanted
    )
    if cache is not None and sizes.self_check and place is None and pooling is None:
        checked += f"; {cache_error_text(engine, loaded, lowered.backend)}"
    if keep_weights and loaded.floats is not None:
        loaded = replace(loaded, module=loaded.floats(), lazy=None, floats=None)
    if pooling is not None:
        loaded = replace(loaded, notes=(*loaded.notes, pooling.line, *pooling.notes))
    lasting = (*loaded.notes, *target.why, *made.report.notes, *made.notes)
    notes = (
        *loaded.notes, captured.note, *target.why, *made.report.notes, *made.notes, *lowered.notes,
        *choice_notes(made.graph_module, target.device, lowered.kernels), checked,
    )  # fmt: skip
    report = replace(made.report, kernels=lowered.kernels, notes=notes)
    return EngineParts(
        engine, loaded, target.device, lowered.backend, size, layout, lambda: made.graph_module, lambda: report,
        made.quantized, quantized, settings.kernels, settings, lowered, lasting,
    )  # fmt: skip


def longest_prompt(loaded: LoadedModel, pooling: Pooling | None) -> int:
    limit = None if pooling is None else pooling.longest
    return loaded.context if limit is None else min(loaded.context, limit)


def of_rank(settings: PipelineConfig, loaded: LoadedModel, place: RankPlace | None) -> PipelineConfig:
    """With the part that a rank has, of a model that all ranks have loaded alike."""
    if place is None:
        return settings
    check_heads(loaded.module.config, place.world, loaded.name)
    place.group.agree("checkpoint", fingerprint(loaded, loaded.module))
    return with_sets(settings, shard_sets(place.rank, place.world))
