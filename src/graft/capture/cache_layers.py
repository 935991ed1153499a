"""What one layer of a Hugging Face cache holds: tensors, which become inputs of the graph, and numbers in Python.

    StaticLayer                keys, values, cumulative_length
    StaticSlidingWindowLayer   and cumulative_length_int, by which its Python code branches
    LinearAttentionLayer       conv_states {0: tensor}, recurrent_states {0: tensor}, has_previous_state {0: bool}
    EncoderDecoderCache        is_updated {layer: bool}: whether the keys of the encoder are there

The numbers (COUNTERS) are inputs too; another one takes another way through the program. Everything else on a layer
has to stay as it is while the model runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graft.base.errors import CaptureError, UsageError

COUNTERS = ("cumulative_length_int", "has_previous_state", "is_updated")
STATES = ("conv_states", "recurrent_states")
CacheLayer = Any  # of transformers, whose import takes seconds
Before = dict[str, Any]  # the attributes of a layer at some time


def pack_layer(layer: CacheLayer) -> dict[str, Any]:
    """The tensors and counters of a layer as plain containers with names for keys, as files can hold them."""
    packed: dict[str, Any] = {}
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            packed[name] = value
        elif name in COUNTERS:
            packed[name] = list(value.values()) if isinstance(value, dict) else value
        elif isinstance(value, dict):
            tensors = {str(key): item for key, item in value.items() if isinstance(item, torch.Tensor)}
            packed |= {name: tensors} if tensors else {}
    return packed


def unpack_layer(layer: CacheLayer, packed: dict[str, Any]) -> None:
    """Puts packed values into `layer`, which is a copy of another: containers that they share are made anew."""
    for name, value in vars(layer).items():
        given = packed.get(name, value)
        if isinstance(value, dict) and isinstance(given, list):
            given = dict(zip(value, given, strict=True))
        elif isinstance(value, dict):
            given = {key: given.get(str(key), item) for key, item in value.items()} if name in packed else dict(value)
        setattr(layer, name, given)
    if isinstance(getattr(layer, "keys", None), torch.Tensor):
        layer.max_cache_len = layer.keys.shape[-2]  # from the tensor, so that it is no number in the graph


def counters_of(layer: CacheLayer) -> list[int]:
    found = []
    for name in COUNTERS:
        value = vars(layer).get(name, ())
        found += value.values() if isinstance(value, dict) else [value] if name in vars(layer) else []
    return found


def set_counters(layer: CacheLayer, values: Sequence[int]) -> None:
    rest = iter(values)
    for name in COUNTERS:
        known = vars(layer).get(name)
        if isinstance(known, dict):
            known.update({key: next(rest) for key in known})
        elif name in vars(layer):
            setattr(layer, name, next(rest))


def is_counter(path: str) -> bool:
    """Whether the input of this name is a counter: `cache.layers[0].has_previous_state[1]`."""
    return path.rpartition(".")[2].partition("[")[0] in COUNTERS


def snapshot(layer: CacheLayer) -> Before:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}


def put_back(layer: CacheLayer, before: Before) -> None:
    vars(layer).clear()
    vars(layer).update(before)


def is_empty(layer: CacheLayer) -> bool:
    """Whether a first run of the model would allocate tensors for it, as far as the layer tells."""
    states = [item for name in STATES for item in vars(layer).get(name, {}).values()]
    if states and all(item is None for item in states):
        return True
    return not vars(layer).get("is_initialized", True)


def allocate_layer(layer: CacheLayer, known: CacheLayer | None) -> None:
    """Gives a layer without tensors those that the layer `known` has, empty."""
    if not vars(layer).get("is_initialized", True):
        if known is None:
            raise UsageError(
                "the StaticCache has no tensors yet, and a loaded module does not know their sizes;"
                " call cache.early_initialization(batch_size, num_heads, head_dim, dtype, device) first"
            )
        if known.is_initialized:
            layer.lazy_initialization(known.keys[:, :, :0], known.values[:, :, :0])
    for name in STATES if known is not None else ():
        for index, state in vars(known).get(name, {}).items():
            if state is not None and vars(layer)[name][index] is None:
                layer.lazy_initialization(**{name: state, "state_idx": index})


def check_kept(layer: CacheLayer, before: Before) -> None:
    """What changed on a layer, other than the values of its tensors and its counters, would be lost."""
    for name, value in vars(layer).items():
        if name not in COUNTERS and not same(value, before.get(name)):
            raise CaptureError(
                f"{type(layer).__name__}.{name} is set anew while the model runs; only writes in place and the"
                f" counters {', '.join(COUNTERS)} reach the caller's cache. Use another cache class"
            )


def same(value: Any, old: Any) -> bool:
    if value is old:
        return True
    if isinstance(value, torch.Tensor) or isinstance(old, torch.Tensor):
        return False
    if isinstance(value, dict) and isinstance(old, dict):
        return value.keys() == old.keys() and all(same(item, old[key]) for key, item in value.items())
    return value == old
