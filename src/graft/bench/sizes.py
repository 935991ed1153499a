"""Models of a family that a machine can hold and read in seconds: the real widths, fewer layers, fewer tokens.

A layer of a model is what a step repeats, so the share of the bandwidth that a few real layers reach is that of the
whole model, but for the head, which is one more matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from graft.models.load import build_random
from graft.models.registry import RegistryEntry

LAYERS = ("num_hidden_layers", "n_layer", "num_layers")  # as configurations name it
A_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")  # lists with an item for each
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
VOCABULARY = 32_000  # of a model whose tables alone would be too large
META = torch.device("meta")


@dataclass(frozen=True)
class SizedModel:
    """A registry entry with at most so many bytes of weights, if one layer is not more. layers: kept, `of` all."""

    entry: RegistryEntry
    layers: int
    of: int
    vocabulary: int
    bytes: int

    @property
    def is_whole(self) -> bool:
        return self.layers == self.of and self.vocabulary == self.entry.settings["vocab_size"]


def sized(entry: RegistryEntry, dtype: torch.dtype, most: int | None) -> SizedModel:
    """most: bytes of weights; None for the model as it is."""
    everything, vocabulary = layer_count(entry.settings), entry.settings["vocab_size"]
    fixed, each = shares(entry, dtype)
    if most is None or fixed + everything * each <= most:
        return SizedModel(entry, everything, everything, vocabulary, fixed + everything * each)
    settings = dict(entry.settings)
    if fixed > most // 2 and vocabulary > VOCABULARY:
        settings |= {"vocab_size": VOCABULARY, **dict.fromkeys(TOKEN_IDS, 0)}
        fixed, each = shares(replace(entry, settings=settings), dtype)
    layers = max(1, min(everything, (most - fixed) // each))
    cut = replace(entry, settings=with_layers(settings, layers))
    return SizedModel(cut, layers, everything, settings["vocab_size"], fixed + layers * each)


def shares(entry: RegistryEntry, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that a model has once, and bytes of a layer; told from models of the last layer's kind alone."""
    one, two = (weights(replace(entry, settings=with_layers(entry.settings, n)), dtype) for n in (1, 2))
    return one - (two - one), two - one


def weights(entry: RegistryEntry, dtype: torch.dtype) -> int:
    return sum(weight.nbytes for weight in build_random(entry, dtype, META).module.parameters())


def layer_count(settings: Mapping[str, Any]) -> int:
    return settings[layer_key(settings)]


def layer_key(settings: Mapping[str, Any]) -> str:
    return next(key for key in LAYERS if key in settings)


def with_layers(settings: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The first `layers` of them."""
    lists = {key: settings[key][:layers] for key in A_LAYER if key in settings}
    return {**settings, layer_key(settings): layers, **lists}
