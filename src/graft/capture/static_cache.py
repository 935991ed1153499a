"""Hugging Face's StaticCache as an argument: its tensors and counters become plain inputs of the graph.

    caller:  model(input_ids=ids, past_key_values=cache)            cache: a StaticCache
    graph:   (ids, keys₀, values₀, length₀, keys₁, …) → logits      keys, values and lengths are written in place

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

from graft.base.errors import CaptureError, UsageError
from graft.capture.dynamic import like
from graft.ir.snapshot import Noted

PREFIX = "module"
COUNTERS = ("cumulative_length_int",)
StaticCache = Any  # transformers' class: importing it takes seconds, which a module without caches should not pay
NUMBER = "static_cache"  # marks a dict that stands for a cache


def is_cache(value: object) -> bool:
    known = sys.modules.get("transformers.cache_utils")
    return known is not None and isinstance(value, known.StaticCache)


def find_caches(value: Any) -> list[StaticCache]:
    """Every StaticCache among the arguments, each once."""
    found: list[StaticCache] = []
    replace(value, lambda cache, _: found.append(cache) if all(cache is not c for c in found) else None)
    return found


def replace(value: Any, change: Callable[[StaticCache, str], Any], path: str = "") -> Any:
    """`value` with `change(cache, path)` for every StaticCache in it. Results of Hugging Face keep their class."""
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
        return {NUMBER: number, "layers": [pack_layer(layer) for layer in cache.layers]}

    return replace(value, packed)


def pack_layer(layer: Any) -> dict[str, Any]:
    state = vars(layer)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return tensors | {name: state[name] for name in COUNTERS if name in state}


def initialize(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], caches: list[StaticCache]
) -> None:
    """Allocates caches that have no tensors yet. Only a run of the model tells their sizes; it is on a copy."""
    if all(layer.is_initialized for cache in caches for layer in cache.layers):
        return
    trials = {id(cache): copy.deepcopy(cache) for cache in caches}
    with torch.no_grad():
        module(*(replace(a, lambda c, _: trials[id(c)]) for a in args), **replace(kwargs, lambda c, _: trials[id(c)]))
    for cache in caches:
        allocate(cache, trials[id(cache)])


def allocate(cache: StaticCache, example: StaticCache | None) -> list[Any]:
    """Gives the layers of `cache` that have no tensors those that the layers of `example` have, empty; which ones."""
    fresh = [(layer, index) for index, layer in enumerate(cache.layers) if not layer.is_initialized]
    for layer, index in fresh:
        if example is None:
            raise UsageError(
                "the StaticCache has no tensors yet, and a loaded module does not know their sizes;"
                " call cache.early_initialization(batch_size, num_heads, head_dim, dtype, device) first"
            )
        known = example.layers[index]
        layer.lazy_initialization(known.keys[:, :, :0], known.values[:, :, :0])
    return [layer for layer, _ in fresh]


def release(layers: list[Any]) -> None:
    """Takes back what `allocate` gave, for a call that was refused."""
    for layer in layers:
        layer.keys, layer.values, layer.is_initialized = None, None, False


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
        before = [[dict(vars(layer)) for layer in cache.layers] for cache in caches.values()]
        result = self.module(*args, **kwargs)
        returned: list[tuple[str, int]] = []

        def take(cache: StaticCache, path: str) -> None:
            returned.append((path, next(number for number, known in caches.items() if known is cache)))

        result = replace(result, take)
        self.results.returned = tuple(returned)
        for cache, known in zip(caches.values(), before, strict=True):
            for layer, state in zip(cache.layers, known, strict=True):
                check_kept(layer, state)
        return result, [counters(cache) for cache in caches.values()]

    def unpack(self, value: Any, caches: dict[int, StaticCache]) -> Any:
        if isinstance(value, dict) and NUMBER in value:
            caches[value[NUMBER]] = rebuild(self.caches[value[NUMBER]], value["layers"])
            return caches[value[NUMBER]]
        if isinstance(value, dict):
            return {key: self.unpack(item, caches) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return like(value, [self.unpack(item, caches) for item in value])
        return value


def counters(cache: StaticCache) -> list[list[int]]:
    return [[vars(layer)[name] for name in COUNTERS if name in vars(layer)] for layer in cache.layers]


def hand_back(result: Any, caches: list[StaticCache], returned: tuple[tuple[str, int], ...] | None) -> Any:
    """What the model would have returned: the caller's caches in their places, with their counters set."""
    result, counts = result
    for cache, known in zip(caches, counts, strict=True):
        for layer, values in zip(cache.layers, known, strict=True):
            vars(layer).update(zip((name for name in COUNTERS if name in vars(layer)), values, strict=True))
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


def rebuild(cache: StaticCache, layers: list[dict[str, Any]]) -> StaticCache:
    """A cache like `cache` around other tensors and counters."""
    new = copy.copy(cache)
    new.layers = [copy.copy(layer) for layer in cache.layers]
    for layer, known in zip(new.layers, layers, strict=True):
        vars(layer).update(known)
        layer.max_cache_len = layer.keys.shape[-2]
    return new


def check_kept(layer: Any, before: dict[str, Any]) -> None:
    """What changed on a layer, other than the values of its tensors and its counters, would be lost."""
    for name, value in vars(layer).items():
        old = before.get(name)
        if name in COUNTERS or value is old:
            continue
        if isinstance(value, torch.Tensor) or isinstance(old, torch.Tensor) or value != old:
            raise CaptureError(
                f"{type(layer).__name__}.{name} is set anew while the model runs; only writes in place and the"
                f" counters {', '.join(COUNTERS)} reach the caller's cache. Use another cache class"
            )
