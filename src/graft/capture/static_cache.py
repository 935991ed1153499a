"""Hugging Face's StaticCache as an argument: its tensors and counters become plain inputs of the graph.

    caller:  model(input_ids=ids, past_key_values=cache)            cache: a StaticCache
    graph:   (ids, keys₀, values₀, length₀, keys₁, …) → logits      keys, values and lengths are written in place

An EncoderDecoderCache of two StaticCaches is one cache with the layers of both. The keys of the encoder are written
by the first call; that they are there (`is_updated`) is a number in Python, so later calls take a graph that only
reads them.

The caller's cache object stays the caller's: its tensors are written in place, its Python counters are set after the
call as eager sets them, and results that hold the cache hold the caller's. The cache length is read from the tensors
instead of from `max_cache_len`, so that it is not a number in the graph and caches may grow.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from graft.base.errors import CaptureError, UnsupportedCache
from graft.capture.cache_layers import (
    Before,
    CacheLayer,
    allocate_layer,
    check_kept,
    counters_of,
    is_empty,
    pack_layer,
    put_back,
    set_counters,
    snapshot,
    unpack_layer,
)
from graft.capture.dynamic import like
from graft.ir.snapshot import Noted

PREFIX = "module"
StaticCache = Any  # transformers' classes: importing them takes seconds, which a module without caches should not pay
NUMBER = "static_cache"  # marks a dict that stands for a cache
HALVES = ("self_attention_cache", "cross_attention_cache")


def is_cache(value: object) -> bool:
    """Whether it is a cache that graft carries; raises UnsupportedCache for other ones of Hugging Face's."""
    known = sys.modules.get("transformers.cache_utils")
    if known is None or not isinstance(value, known.Cache):
        return False
    parts = [value]
    if isinstance(value, known.EncoderDecoderCache):
        parts = [value.self_attention_cache, value.cross_attention_cache]
    for part in parts:
        name = type(part).__name__
        if isinstance(part, known.QuantizedCache):
            raise UnsupportedCache(name, "keeps quantised copies that it makes anew as it grows")
        if not isinstance(part, known.StaticCache):
            raise UnsupportedCache(
                name, "replaces its tensors as it grows, where a graph writes into memory it is given"
            )
        if part.offloading:
            raise UnsupportedCache(
                f"{name}(offloading=True)", "moves its layers between devices while the model runs"
            )
    return True


def halves(cache: StaticCache) -> tuple[str, ...]:
    """The caches that an EncoderDecoderCache is made of; none for others."""
    return HALVES if hasattr(cache, HALVES[0]) else ()


def layers_of(cache: StaticCache) -> list[CacheLayer]:
    """All that holds tensors or counters."""
    names = halves(cache)
    return [*(layer for name in names for layer in getattr(cache, name).layers), cache] if names else cache.layers


def find_caches(value: Any) -> list[StaticCache]:
    """Every cache among the arguments, each once; raises UnsupportedCache where graft does not carry one."""
    found: list[StaticCache] = []
    replace(value, lambda cache, _: found.append(cache) if all(cache is not c for c in found) else None)
    return found


def refuse_new_caches(result: Any) -> None:
    """Raises for a cache in the result of a program that takes none: it makes one anew at every call."""
    if cache := next(iter(find_caches(result)), None):
        raise UnsupportedCache(type(cache).__name__, "is made anew at every call, and a graph returns tensors")


def replace(value: Any, change: Callable[[StaticCache, str], Any], path: str = "") -> Any:
    """`value` with `change(cache, path)` for every cache in it. Results of Hugging Face keep their class."""
    if is_cache(value):
        return change(value, path)
    if isinstance(value, dict):
        changed = {key: replace(item, change, f"{path}.{key}") for key, item in value.items()}
        return type(value)(**changed) if type(value) is not dict else changed
    if isinstance(value, (list, tuple)):
        return like(value, [replace(item, change, f"{path}.{index}") for index, item in enumerate(value)])
    return value


def pack(value: Any, caches: list[StaticCache]) -> Any:
    """`value` with the tensors and counters of each cache in its place."""

    def packed(cache: StaticCache, _: str) -> dict[str, Any]:
        number = next(index for index, known in enumerate(caches) if known is cache)
        return {NUMBER: number, **pack_cache(cache)}

    return replace(value, packed)


def pack_cache(cache: StaticCache) -> dict[str, Any]:
    names = halves(cache)
    if names:
        return {name: pack_cache(getattr(cache, name)) for name in names} | pack_layer(cache)
    return {"layers": [pack_layer(layer) for layer in cache.layers]}


def initialize(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], caches: list[StaticCache]
) -> None:
    """Allocates caches that have no tensors yet. Only a run of the model tells their sizes; it is on a copy."""
    if not any(is_empty(layer) for cache in caches for layer in layers_of(cache)):
        return
    trials = {id(cache): copy.deepcopy(cache) for cache in caches}
    with torch.no_grad():
        module(*(replace(a, lambda c, _: trials[id(c)]) for a in args), **replace(kwargs, lambda c, _: trials[id(c)]))
    for cache in caches:
        allocate(cache, trials[id(cache)])


def allocate(cache: StaticCache, example: StaticCache | None) -> list[tuple[CacheLayer, Before]]:
    """Gives the layers of `cache` that have no tensors those that the layers of `example` have, empty; which ones,
    and what they were before."""
    known = layers_of(example) if example is not None else [None] * len(layers_of(cache))
    if len(known) != len(layers_of(cache)):
        return []  # the check of the nesting says so
    fresh = [
        (layer, other, snapshot(layer))
        for layer, other in zip(layers_of(cache), known, strict=True)
        if is_empty(layer)
    ]
    for layer, other, _ in fresh:
        allocate_layer(layer, other)
    return [(layer, before) for layer, _, before in fresh]


def release(layers: list[tuple[CacheLayer, Before]]) -> None:
    """Takes back what `allocate` gave, for a call that was refused."""
    for layer, before in layers:
        put_back(layer, before)


@dataclass
class Results(Noted):
    """Where the result holds which cache, once the model ran. Not on the module: export puts attributes back."""

    returned: tuple[tuple[str, int], ...] = ()


class WithCaches(torch.nn.Module):
    """The model with caches as plain containers: packed arguments → (results without caches, counters)."""

    def __init__(self, module: torch.nn.Module, caches: list[StaticCache]) -> None:
        super().__init__()
        self.module = module
        self.train(module.training)
        self.caches = caches
        self.results = Results()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        caches: dict[int, StaticCache] = {}
        args, kwargs = self.unpack(args, caches), self.unpack(kwargs, caches)
        before = [[snapshot(layer) for layer in layers_of(cache)] for cache in caches.values()]
        result = self.module(*args, **kwargs)
        returned: list[tuple[str, int]] = []

        def take(cache: StaticCache, path: str) -> None:
            number = next((number for number, known in caches.items() if known is cache), None)
            if number is None:
                raise CaptureError(f"the program returns a {type(cache).__name__} that is none of its arguments")
            returned.append((path, number))

        result = replace(result, take)
        self.results.returned = tuple(returned)
        for cache, known in zip(caches.values(), before, strict=True):
            for layer, state in zip(layers_of(cache), known, strict=True):
                check_kept(layer, state)
        return result, [[counters_of(layer) for layer in layers_of(cache)] for cache in caches.values()]

    def unpack(self, value: Any, caches: dict[int, StaticCache]) -> Any:
        if isinstance(value, dict) and NUMBER in value:
            caches[value[NUMBER]] = rebuild(self.caches[value[NUMBER]], value)
            return caches[value[NUMBER]]
        if isinstance(value, dict):
            return {key: self.unpack(item, caches) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return like(value, [self.unpack(item, caches) for item in value])
        return value


def hand_back(result: Any, caches: list[StaticCache], returned: tuple[tuple[str, int], ...] | None) -> Any:
    """What the model would have returned: the caller's caches in their places, with their counters set."""
    result, counts = result
    for cache, known in zip(caches, counts, strict=True):
        for layer, values in zip(layers_of(cache), known, strict=True):
            set_counters(layer, values)
    for path, number in returned or ():
        result = put(result, path.split(".")[1:], caches[number])
    return result


def put(value: Any, path: list[str], cache: StaticCache) -> Any:
    if not path:
        return cache
    if isinstance(value, dict):
        value[path[0]] = put(value.get(path[0]), path[1:], cache)
        return value
    index = int(path[0])
    return like(value, [put(item, path[1:], cache) if i == index else item for i, item in enumerate(value)])


def rebuild(cache: StaticCache, packed: dict[str, Any]) -> StaticCache:
    """A cache like `cache` around other tensors and counters."""
    new = copy.copy(cache)
    for name in halves(cache):
        setattr(new, name, rebuild(getattr(cache, name), packed[name]))
    if halves(cache):
        unpack_layer(new, {name: value for name, value in packed.items() if name not in HALVES})
        return new
    new.layers = [copy.copy(layer) for layer in cache.layers]
    for layer, known in zip(new.layers, packed["layers"], strict=True):
        unpack_layer(layer, known)
    return new
