"""How many bytes a decode step must read: the weights once, and the keys and values of every token so far."""

from __future__ import annotations

from typing import Any

from torch import nn


def step_bytes(module: nn.Module, batch: int, tokens: float) -> float:
    """For `batch` sequences of `tokens` tokens each, on average."""
    return weight_bytes(module, batch) + batch * cache_bytes(module, tokens)


def weight_bytes(module: nn.Module, batch: int) -> float:
    """Each weight once; an embedding table that is not also the output head counts as nothing, a row of it is read.

    Of experts the share that `batch` tokens reach at least once, if the router spreads them evenly.
    """
    config: Any = module.config
    table, head = module.get_input_embeddings(), module.get_output_embeddings()  # pyrefly: ignore
    skipped = table.weight if head is None or head.weight is not table.weight else None
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    share = 1 - (1 - config.num_experts_per_tok / experts) ** batch if experts else 1.0
    total = 0.0
    for name, weight in module.named_parameters():  # tied ones come once
        if weight is not skipped:
            total += weight.numel() * weight.element_size() * (share if ".experts." in name else 1.0)
    return total


def cache_bytes(module: nn.Module, tokens: float) -> float:
    """Keys and values of one sequence, layer by layer; a sliding window bounds what is read."""
    config: Any = module.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    seen = sum(min(tokens, window) if window and "sliding" in kind else tokens for kind in kinds)
    return 2 * seen * heads * size * next(module.parameters()).element_size()
