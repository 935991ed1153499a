"""The ways to spell an RMSNorm: how the row is normalized, and how the weight comes in.

A normalization takes x and eps and gives the float32 row; an ending applies the weight and goes back to x's dtype.
Every pair of the two is one pattern.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graft.ir.nodes import is_weight, tensor_val, where
from graft.ir.patterns.match import Match, Refused

Normalize = Callable[[Tensor, float], Tensor]
Pattern = Callable[..., Tensor]


# ── normalizations: x [..., d] → float32 [..., d] ───────────────────────────────────────────────────────────────


def mean_square(h: Tensor) -> Tensor:
    return h.pow(2).mean(-1, keepdim=True)


def sum_square(h: Tensor) -> Tensor:
    return h.pow(2).sum(-1, keepdim=True) / h.shape[-1]


def times_rsqrt(h: Tensor, v: Tensor) -> Tensor:
    return h * torch.rsqrt(v)


def times_reciprocal(h: Tensor, v: Tensor) -> Tensor:
    return h * torch.reciprocal(torch.sqrt(v))


def over_sqrt(h: Tensor, v: Tensor) -> Tensor:
    return h / torch.sqrt(v)


def normalization(square: Callable[[Tensor], Tensor], scale: Callable[[Tensor, Tensor], Tensor]) -> Normalize:
    def normalize(x: Tensor, eps: float) -> Tensor:
        h = x.to(torch.float32)
        return scale(h, square(h) + eps)

    return normalize


def promoted(x: Tensor, eps: float) -> Tensor:
    """T5: x itself is multiplied, and becomes float32 by the product."""
    return x * torch.rsqrt(mean_square(x.to(torch.float32)) + eps)


# ── endings ─────────────────────────────────────────────────────────────────────────────────────────────────────


def cast_then_weight(normalize: Normalize) -> Pattern:
    """Llama."""

    def pattern(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return weight * normalize(x, eps).to(x.dtype)

    return pattern


def weight_then_cast(normalize: Normalize) -> Pattern:
    """OLMo 2: the product with the weight is float32 because the row is."""

    def pattern(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return (weight * normalize(x, eps)).to(x.dtype)

    return pattern


def rounded_then_weight(normalize: Normalize) -> Pattern:
    """Llama on a float32 row (gated by Mamba, or a sum that was not rounded): it is rounded to the weight's dtype."""

    def pattern(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return weight * normalize(x, eps).to(weight.dtype)

    return pattern


def float_weight_then_cast(normalize: Normalize) -> Pattern:
    def pattern(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return (weight.to(torch.float32) * normalize(x, eps)).to(x.dtype)

    return pattern


def offset_weight_then_cast(normalize: Normalize) -> Pattern:
    """Gemma: the weight is stored less an offset of 1."""

    def pattern(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        return (normalize(x, eps) * (weight.to(torch.float32) + offset)).to(x.dtype)

    return pattern


def spelled(ending: Callable[[Normalize], Pattern], normalize: Normalize, name: str) -> Pattern:
    """One pattern, under the name that reports show."""
    pattern = ending(normalize)
    pattern.__name__ = name
    return pattern


def without_eps(function: Pattern) -> Pattern:
    """The spelling with eps 0, whose addition the normal form leaves out."""

    def pattern(x: Tensor, weight: Tensor) -> Tensor:
        return function(x, weight, 0.0)

    def offset_pattern(x: Tensor, weight: Tensor, offset: float) -> Tensor:
        return function(x, weight, 0.0, offset)

    chosen = offset_pattern if "offset" in function.__annotations__ else pattern
    chosen.__name__ = f"{function.__name__}_without_eps"
    return chosen


def check_vectors(match: Match, *names: str) -> None:
    """Refused where an argument is not a parameter with one value a channel of x."""
    x = tensor_val(match.tensors["x"])
    for name in names:
        node = match.tensors[name]
        tensor = tensor_val(node)
        if x is None or tensor is None or tensor.dim() != 1 or tensor.shape[0] != x.shape[-1]:
            raise Refused(match.anchor, f"the {name} is not one value a channel")
        if not is_weight(node):
            reason = f"the {name} {where(node)} is computed in the graph, it is not a parameter"
            raise Refused(match.anchor, reason)
