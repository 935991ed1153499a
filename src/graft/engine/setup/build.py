"""From a lowered decoder to an engine with a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from graft.base.device_memory import CacheSize, cache_size, is_out_of_memory, size_text
from graft.base.errors import OutOfMemory
from graft.base.files import Progress
from graft.engine.decode.build import loop_problem, make_loop
from graft.engine.engine import Engine
from graft.engine.kv.events import EventQueue
from graft.engine.kv.manager import BlockManager
from graft.engine.kv.offload import host_memory, offload_note
from graft.engine.kv.states import StateCache, slots_within, states_note
from graft.engine.kv.tensors import LayerShape, allocate, bytes_per_block, copy_blocks, narrow_blocks
from graft.engine.options import EngineOptions
from graft.engine.pooling import PoolingEngine
from graft.engine.ranks.task import RankPlace
from graft.engine.scheduler import Scheduler
from graft.models.loaded import LoadedModel
from graft.models.pooling import Pooling
from graft.ops.packed_states import StateShape
from graft.weights.quantize import FP8


def build_engine(
    graph: Callable[..., Any],
    model: LoadedModel,
    layers: Sequence[LayerShape],
    block_size: int,
    options: EngineOptions,
    device: torch.device,
    *,
    content: str,
    states: Sequence[StateShape] = (),
    backend: str = "eager",
    progress: Progress | None = None,
    record: bool | None = None,
    ends: frozenset[int] | None = None,
    place: RankPlace | None = None,
    pooling: Pooling | None = None,
) -> tuple[Engine, str]:
    """The engine, and a line about the size of its cache.

    content: the fingerprint of the weights that the graph reads. ends: the end tokens, where the module does not
    know them. place: of one of several ranks, which all have as many blocks. record: whether decode steps are
    captured; None: where that is of use (see loop_problem). pooling: of an engine that embeds. states: of recurrent
    layers.
    """
    size = bytes_per_block(layers, block_size)
    wanted = options.requests_at_once(device)
    most = wanted * -(-model.context // block_size)
    kept = slots_within(states, wanted, device, options.kv_cache_memory) if states else None
    beside = 0 if kept is None else kept.bytes
    found = room(size, most, device, options, narrow_blocks(layers, block_size), place, beside)
    problem = loop_problem(device, backend, options, ranks=place.world if place else 1)
    record = problem is None if record is None else record
    tensors = allocated(layers, found, record, block_size, device)
    reuse, foreseeing = options.enable_prefix_caching and not states, options.admission == "forecast"
    host = host_memory(tensors, size, options, ranks=place.world if place else 1, recurrent=bool(states))
    manager = BlockManager(
        found.blocks, block_size, fingerprint=content, prefix_reuse=reuse,
        host_blocks=0 if host is None else len(host.slots), events=EventQueue(options.max_events),
    )  # fmt: skip
    rows = options.requests_at_once(device, found.blocks * block_size)
    rows = rows if kept is None else slots_of_all(min(rows, kept.blocks), place)
    held = None if kept is None else StateCache(states, rows, device, padding=record)
    tokens = options.tokens_of_a_step(device), options.max_mixed_prefill_tokens
    scheduler = Scheduler(manager, rows, *tokens, forecast=foreseeing, states=held)
    loop = make_loop(graph, tensors, scheduler, model.context, options, progress) if record else None
    kind = Engine if pooling is None else partial(PoolingEngine, pooling=pooling)
    engine = kind(
        graph,
        tensors,
        scheduler,
        end_tokens=end_tokens(model) if ends is None else ends,
        tokenizer=model.tokenizer,
        loop=loop,
        notes=(
            *(() if record else (f"decode: no CUDA graphs, because {problem}",)),
            *(() if held is None else (states_note(held, wanted),)),
            *(() if host is None else (offload_note(host),)),
        ),
        move=copy_blocks if host is None else host.move,
    )
    return engine, cache_note(found, layers, block_size, model)


def cache_note(found: CacheSize, layers: Sequence[LayerShape], block_size: int, model: LoadedModel) -> str:
    """For the report."""
    note = f"key-value cache: {found.blocks} blocks of {block_size} tokens, {size_text(found.bytes)} ({found.reason})"
    if layers and layers[0].dtype is FP8:
        each, own = (bytes_per_block(some, block_size) // block_size for some in (layers, wide(layers, model)))
        note += f"; float8_e4m3fn with a scale a token and head, {each:,} bytes a token and not {own:,}"
    if found.blocks * block_size < model.context:
        note += f"; the model's context of {model.context} does not fit"
    return note


def allocated(
    layers: Sequence[LayerShape], found: CacheSize, record: bool, block_size: int, device: torch.device
) -> list[Tensor]:
    try:
        return allocate(layers, found.blocks + record, block_size, device)  # one block more for padding rows
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"no memory for a key-value cache of {found.blocks} blocks ({size_text(found.bytes)}) on {device}:"
            f" {error}. Set kv_cache_memory to less"
        ) from error


def room(
    size: int, most: int, device: torch.device, options: EngineOptions, narrow: int | None, place: RankPlace | None,
    beside: int,
) -> CacheSize:  # fmt: skip
    """For the cache; of several ranks each has as many blocks as the one with the least room."""
    if place is None:
        return cache_size(size, most, device, options.kv_cache_memory, narrow, beside=beside)
    found = cache_size(size, most, device, options.kv_cache_memory, narrow, sharers=place.sharers)
    blocks = place.group.least(found.blocks)
    return replace(found, blocks=blocks, bytes=blocks * size)


def slots_of_all(slots: int, place: RankPlace | None) -> int:
    """Of recurrent states: a request has the same slot on every rank."""
    return slots if place is None else place.group.least(slots)


def wide(layers: Sequence[LayerShape], model: LoadedModel) -> list[LayerShape]:
    """The same in the model's dtype."""
    return [replace(layer, dtype=model.module.dtype) for layer in layers]


def end_tokens(model: LoadedModel) -> frozenset[int]:
    """The model's end-of-text tokens, from its generation config or its config."""
    for config in (getattr(model.module, "generation_config", None), model.module.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, (list, tuple)) else [ids])
    return frozenset()


def fingerprint(
    model: LoadedModel, weights: Module, cache_dtype: torch.dtype | None = None, *, latent: bool = False
) -> str:
    """What the cache's content depends on beside the tokens: configuration, dtype and weights (a few of each), the
    cache's dtype where it is not theirs, and whether it keeps latent rows.

    The weights are those that the graph reads, quantized or not; the module may have freed its own. Of those that
    still lie in their file a few are read there.
    """
    digest = blake2b(digest_size=16)
    digest.update(model.module.config.to_json_string().encode())
    if cache_dtype is not None:
        digest.update(f"cache {cache_dtype}".encode())
    if latent:
        digest.update(b"latent rows")
    for name, weight in weights.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} {sample(model, weight)}".encode())
    return digest.hexdigest()


def sample(model: LoadedModel, weight: torch.Tensor) -> object:
    if model.lazy is not None and weight in model.lazy:
        return model.lazy.sample(weight)
    return weight.detach().flatten()[:8].float().cpu().tolist()
