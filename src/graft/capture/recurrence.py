"""Recurrent layers: the functions that Hugging Face's models call for them become graft's ops in a captured graph.

Models of KINDS compute their recurrences through functions of their own module, by name:

    causal_conv1d_fn(x, weight, bias, activation)          graft::causal_conv
    torch_chunk_gated_delta_rule(q, k, v, g, beta)[0]      graft::gated_delta_rule

While a decoder is captured these names lead here. What such a layer keeps for the next step (its conv_states, its
recurrent_states) is accounted for in the module's own cached decode: the very tensor that the cache gives back goes
into the convolution, and the very tensor that the cache takes came out of the recurrence. Kept tensors of which that
is not so, and models that nobody has compared with Hugging Face's, stay refused (capture/state.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

import graft.ops  # noqa: F401  (registers the ops)
from graft.base.errors import UnsupportedState
from graft.capture.kept import StateTensor
from graft.ir.nodes import calls, is_op, options_of, tensor_of
from graft.ops.causal_conv.reference import NONE, SILU

KINDS = ("lfm2", "qwen3_next")  # types of models whose decoding is compared with Hugging Face's
CONV, RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
ACTIVATIONS = {None: NONE, "silu": SILU, "swish": SILU}
HARMLESS = ("position_ids", "cache_position", "use_cache", "output_router_logits", "output_hidden_states")
ops = torch.ops.graft


def conv_hook(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
) -> Tensor:
    refuse_others(CONV, others)
    if activation not in ACTIVATIONS:
        raise UnsupportedState(f"{CONV}: the activation {activation!r} is not one of a causal convolution here")
    return ops.causal_conv(hidden_states, weight, bias, ACTIVATIONS[activation])


def rule_hook(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    refuse_others(RULE, others)
    return ops.gated_delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel), None


def refuse_others(name: str, others: dict[str, Any]) -> None:
    """An initial state, positions of packed sequences: what would be lost."""
    unknown = [k for k, v in others.items() if k not in HARMLESS and v is not None and v is not False]
    if unknown:
        raise UnsupportedState(f"{name}: the argument {unknown[0]}={others[unknown[0]]!r} is not understood")


@contextmanager
def graft_recurrence(model: PreTrainedModel) -> Iterator[None]:
    """Within it, the model's recurrences are graft's ops; afterwards they are as they were."""
    with led_elsewhere(model, {CONV: lambda _: conv_hook, RULE: lambda _: rule_hook}):
        yield


@contextmanager
def led_elsewhere(model: PreTrainedModel, hooks: dict[str, Callable[[Any], Any]]) -> Iterator[None]:
    """hooks: by name, what takes the place of a function, made of that."""
    homes = {type(module).__module__: None for module in model.modules()} if is_known(model) else {}
    with ExitStack() as stack:
        for home in map(sys.modules.__getitem__, homes):
            for name, hook in hooks.items():
                if name in vars(home):
                    stack.enter_context(patch.object(home, name, hook(getattr(home, name))))
        yield


def is_known(model: PreTrainedModel) -> bool:
    return model.config.model_type in KINDS


# ── what is kept ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Watched:
    """Of one decode: what caches gave and took, and what recurrences took and gave. Tensors are held, so that each
    stays itself."""

    into_cache: list[tuple[str, Tensor]] = field(default_factory=list)  # where it is kept
    out_of_cache: list[tuple[str, Tensor]] = field(default_factory=list)
    convolved: list[Tensor] = field(default_factory=list)
    computed: list[Tensor] = field(default_factory=list)

    def accounted(self) -> set[str]:
        convolved, computed = set(map(id, self.convolved)), set(map(id, self.computed))
        given = {where for where, tensor in self.out_of_cache if id(tensor) in convolved}
        return given | {where for where, tensor in self.into_cache if id(tensor) in computed}

    def mark(self, states: list[StateTensor]) -> list[StateTensor]:
        """With those told that are accounted for; a layer with a tensor that is not has none."""
        known, found = self.accounted(), []
        for state in states:
            layer, dot, place = state.path.rpartition(".")
            if state.holder is LinearAttentionLayer and dot:
                own = [s.path for s in states if s.path.rpartition(".")[0] == layer]
                fits = all(path.removeprefix("past_key_values.") in known for path in own)
                state = replace(state, recurrent=fits and place.startswith(("conv_states", "recurrent_states")))
            found.append(state)
        return found


@contextmanager
def watched_recurrence(model: PreTrainedModel) -> Iterator[Watched]:
    seen = Watched()
    update_conv, update_recurrent = Cache.update_conv_state, Cache.update_recurrent_state

    def conv_state(cache: Cache, states: Tensor, layer_idx: int, *args: Any, **options: Any) -> Tensor:
        given = update_conv(cache, states, layer_idx, *args, **options)
        seen.out_of_cache.append((f"layers[{layer_idx}].conv_states[{options.get('state_idx', 0)}]", given))
        return given

    def recurrent_state(cache: Cache, states: Tensor, layer_idx: int, *args: Any, **options: Any) -> Tensor:
        seen.into_cache.append((f"layers[{layer_idx}].recurrent_states[{options.get('state_idx', 0)}]", states))
        return update_recurrent(cache, states, layer_idx, *args, **options)

    def convolution(function: Any) -> Any:
        def convolve(x: Tensor, *args: Any, **options: Any) -> Tensor:
            seen.convolved.append(x)
            return function(x, *args, **options)

        return convolve

    def recurrence(function: Any) -> Any:
        def compute(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
            out, state = function(*args, **options)
            seen.computed += [] if state is None else [state]
            return out, state

        return compute

    with (
        led_elsewhere(model, {CONV: convolution, RULE: recurrence}),
        patch.object(Cache, "update_conv_state", conv_state),
        patch.object(Cache, "update_recurrent_state", recurrent_state),
    ):
        yield seen


def lost_recurrences(kept: Sequence[StateTensor], gm: GraphModule) -> str | None:
    """What is kept and has no op of its sizes in the graph, one for one; None where all have."""
    for name, made in (("conv_states", convolved_sizes(gm)), ("recurrent_states", ruled_sizes(gm))):
        wanted = sorted(state.shape[1:] for state in kept if state.recurrent and state.name == name)
        if wanted != sorted(made):
            return f"it keeps {name} of {wanted}, and the captured graph has recurrences of {sorted(made)}"
    return None


def convolved_sizes(gm: GraphModule) -> list[tuple[int, ...]]:
    return [sizes_of(node, "weight") for node in calls(gm.graph) if is_op(node, ops.causal_conv.default)]


def ruled_sizes(gm: GraphModule) -> list[tuple[int, ...]]:
    """[heads, d_k, d_v]"""
    found = [node for node in calls(gm.graph) if is_op(node, ops.gated_delta_rule.default)]
    return [(*sizes_of(node, "q")[-2:], sizes_of(node, "v")[-1]) for node in found]


def sizes_of(node: Node, name: str) -> tuple[int, ...]:
    return tuple(tensor_of(options_of(node)[name]).shape)
