"""How many bytes a decode step must read: the weights once, and the keys and values of every token so far. And how
many floating point operations a prompt takes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from graft.base.errors import UsageError
from graft.engine.artifact.model import StoredModule
from graft.engine.kv.tensors import LayerShape
from graft.ir.nodes import is_op, options_of, tensor_of
from graft.ops.paged_cache import SCALE
from graft.weights.quantize import FP8

RECURRENT = ("conv", "linear_attention", "mamba")  # layer types of configurations
QUANTIZED = (torch.int8, torch.int16, torch.float8_e4m3fn, torch.uint8)  # int16: four 4-bit weights; uint8: tiles
EXPERT_TENSORS = ("gate_up", "down", "gate_up_bias", "down_bias", "gate_up_scale", "down_scale")


def step_bytes(module: nn.Module, batch: int, tokens: float) -> float:
    """For `batch` sequences of `tokens` tokens each, on average."""
    return weight_bytes(module, batch) + batch * cache_bytes(module, tokens)


def weight_bytes(module: nn.Module, batch: int) -> float:
    """Each weight once; an embedding table that is not also the output head counts as nothing, a row of it is read.

    Of experts the share that `batch` tokens reach at least once, if the router spreads them evenly.
    """
    module = with_weights(module)
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


def with_weights(module: nn.Module) -> nn.Module:
    """What has the sizes of all weights: of a compiled engine, which has no module, one without numbers."""
    return empty_model(module) if isinstance(module, StoredModule) else module


@lru_cache(maxsize=1)
def empty_model(module: StoredModule) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = module.config.to_dict()
    try:
        config = AutoConfig.for_model(**values)
    except ValueError as error:
        raise UsageError(
            f"what a step reads is counted from the model's architecture, and transformers has no"
            f" {values.get('model_type')!r}; measure the model itself, not its compiled engine"
        ) from error
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=module.dtype, trust_remote_code=False)


def cache_bytes(
    module: nn.Module, tokens: float, cache: torch.dtype | None = None, layers: Sequence[LayerShape] = ()
) -> float:
    """What is kept of one sequence, layer by layer; a sliding window bounds what is read. layers: as an engine keeps
    it, perhaps as latent rows; without them keys and values."""
    seen = [min(tokens, window) for window in windows(module)]
    if layers:
        return sum(count * layer.token_bytes for count, layer in zip(seen, layers, strict=True))
    return sum(seen) * cache_bytes_per_token(module, cache)


def cache_bytes_per_token(module: nn.Module, cache: torch.dtype | None = None) -> int:
    """Keys and values of one token in one layer, in the model's dtype, or in float8 with scales."""
    config: Any = module.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if cache is FP8:
        return 2 * heads * (head_size(config) + SCALE.itemsize)
    return 2 * heads * head_size(config) * next(with_weights(module).parameters()).element_size()


def head_size(config: Any) -> int:
    """In the cache; of latent attention the part that is rotated and the rest, which the values are filled up to."""
    if getattr(config, "qk_nope_head_dim", None):
        return config.qk_nope_head_dim + config.qk_rope_head_dim
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def windows(module: nn.Module) -> list[float]:
    """How many tokens each layer with attention can look back on; recurrent ones keep none."""
    config: Any = module.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    attention = [kind for kind in kinds if kind not in RECURRENT]
    return [window if window and "sliding" in kind else float("inf") for kind in attention]


def prompt_flops(module: nn.Module, batch: int, tokens: int) -> float:
    """Multiplications and additions of `batch` prompts: every matrix for every token, the head for the last token of
    each prompt, and causal attention."""
    return batch * (matrix_flops(module, tokens, 1) + attention_flops(module, tokens))


def matrix_flops(module: nn.Module, tokens: int, last: int) -> float:
    """Of every matrix for every token, and the head for `last` of them; of experts those that a token is sent to."""
    module = with_weights(module)
    config: Any = module.config
    table, head = module.get_input_embeddings(), module.get_output_embeddings()  # pyrefly: ignore
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    share = config.num_experts_per_tok / experts if experts else 1.0
    skipped = [table.weight, *([] if head is None else [head.weight])]
    multiplied = 0.0
    for name, weight in module.named_parameters():
        if weight.ndim > 1 and not any(weight is other for other in skipped):
            multiplied += weight.numel() * (share if ".experts." in name else 1.0)
    return 2 * tokens * multiplied + 2 * last * (0 if head is None else head.weight.numel())


def attention_flops(module: nn.Module, tokens: int) -> float:
    """Of a prompt, behind a causal mask."""
    config: Any = module.config
    width = config.num_attention_heads * head_size(config)
    return 4 * width * sum(causal_pairs(tokens, window) for window in windows(module))


def causal_pairs(tokens: int, window: float) -> float:
    """How many (query, key) pairs a causal mask leaves of a prompt."""
    near = min(tokens, window)
    return near * (near + 1) / 2 + (tokens - near) * near


def graph_weight_bytes(gm: GraphModule, batch: int) -> float | None:
    """What a step of `batch` tokens reads of a graph with quantized weights; None where none is. A table that is only
    looked up in counts as nothing, of experts counts the share that some token is sent to."""
    tensors: dict[str, torch.Tensor] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr" and not all("embedding" in str(user.target) for user in node.users):
            value = attrgetter(node.target)(gm)
            if isinstance(value, torch.Tensor):
                tensors[node.target] = value
    if not any(t.dtype in QUANTIZED and t.ndim > 1 for t in tensors.values()):
        return None
    shares = expert_shares(gm, batch)
    distinct = {(t.data_ptr() or name, t.nbytes): t.nbytes * shares.get(name, 1.0) for name, t in tensors.items()}
    packed = [node for node in gm.graph.nodes if node.op == "get_attr" and is_freed(tensors.get(node.target))]
    freed = sum(tensor_of(node).nbytes * shares.get(node.target, 1.0) for node in packed)
    return float(sum(distinct.values()) + freed)


def expert_shares(gm: GraphModule, batch: int) -> dict[str, float]:
    """Of each tensor of a mixture the share that is read, if the router spreads tokens evenly."""
    found: dict[str, float] = {}
    for node in gm.graph.nodes:
        if not is_op(node, torch.ops.graft.moe_experts.default):
            continue
        given = options_of(node)
        chosen, experts = int(tensor_of(given["ids"]).shape[1]), int(tensor_of(given["down"]).shape[0])
        owned = (given[name] for name in EXPERT_TENSORS if given[name] is not None)
        read = (one.args[0] if is_op(one, torch.ops.aten.transpose.int) else one for one in owned)
        found |= {str(one.target): 1 - (1 - chosen / experts) ** batch for one in read}
    return found


def is_freed(tensor: torch.Tensor | None) -> bool:
    """A native region has it, packed; the graph still knows its shape."""
    return tensor is not None and tensor.numel() == 0
