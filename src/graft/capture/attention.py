"""Hugging Face's own hooks, registered under the name "graft": attention becomes graft::attention, masks get a tag.

A mask that is causal, perhaps with a sliding window, is recognised when it is made and carried as a tag; attention
then keeps `is_causal` and `window` instead of a tensor. If a model changes the mask on the way, the tag is gone and
the tensor itself is kept: nothing is assumed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function, sdpa_mask

import graft.ops  # noqa: F401  (registers graft::attention)
from graft.base.errors import UnsupportedAttention

NAME = "graft"
# given by models for other implementations' sake; they do not change what attention computes
HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "output_router_logits", "output_hidden_states"})
_module_names: ContextVar[dict[int, str] | None] = ContextVar("module_names", default=None)


@dataclass(frozen=True)
class CausalMask:
    """What a recognised mask means: not ahead, and not further back than `window`."""

    window: int | None


def attention_hook(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """q, k, v: [b, h, s, d] → [b, s, h, d], as every attention function of Hugging Face."""
    name = (_module_names.get() or {}).get(id(module), type(module).__name__)
    unknown = [k for k, v in others.items() if k not in HARMLESS and v is not None and v is not False]
    if unknown:
        raise UnsupportedAttention(name, f"the argument {unknown[0]}={others[unknown[0]]!r} is not understood")
    if dropout:
        raise UnsupportedAttention(name, f"dropout={dropout} while capturing for inference; call model.eval() first")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    mask, window = attention_mask, sliding_window
    tag = getattr(attention_mask, "graft_tag", None)
    if tag is not None:
        if sliding_window is not None and sliding_window != tag.window:
            raise UnsupportedAttention(name, f"its mask has window {tag.window} but it asks for {sliding_window}")
        mask, causal, window = None, True, tag.window
    elif attention_mask is not None:
        causal, window = False, None  # the tensor says everything
    out = torch.ops.graft.attention(query, key, value, mask, scale, causal, window, softcap, s_aux)
    return out, None


def mask_hook(**arguments: Any) -> Tensor:
    """The mask that Hugging Face asks for, tagged when it is causal with an optional window and nothing else."""
    mask = sdpa_mask(**{**arguments, "allow_is_causal_skip": False})
    meaning = recognise(arguments["mask_function"])
    if meaning is not None and arguments.get("attention_mask") is None:
        mask.graft_tag = meaning
    return mask


def recognise(function: Callable[..., Any]) -> CausalMask | None:
    """Takes a composed mask function apart. Packed-sequence detection is left out: a row holds one sequence."""
    causal, window = False, None
    for part in parts(function):
        if part is causal_mask_function:
            causal = True
        elif part.__qualname__.startswith("sliding_window_overlay."):
            width = inspect.getclosurevars(part).nonlocals["sliding_window"]
            window = width if window is None else min(window, width)
        elif not part.__qualname__.startswith("packed_sequence_mask_function."):
            return None
    return CausalMask(window) if causal else None


def parts(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    if function.__qualname__.startswith("and_masks."):
        for part in inspect.getclosurevars(function).nonlocals["mask_functions"]:
            yield from parts(part)
    else:
        yield function


AttentionInterface.register(NAME, attention_hook)
AttentionMaskInterface.register(NAME, mask_hook)


@contextmanager
def graft_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within it, the model's attention goes through graft's hooks; afterwards it is as it was."""
    before = model.config._attn_implementation or "eager"
    token = _module_names.set({id(module): name for name, module in model.named_modules()})
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        _module_names.reset(token)
