"""The ways to spell an RMSNorm: how the row is normalized, and how the weight comes in.

A normalization takes x and eps and gives the float32 row; an ending applies the weight and goes back to x's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graft.ir.nodes import is_weight, tensor_val, where
from graft.ir.patterns.match import Match, Refused
from graft.ir.patterns.words import choice, constant

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
    """T5: x itself is multiplied, and becomes float32 by that."""
    return x * torch.rsqrt(mean_square(x.to(torch.float32)) + eps)


# ── endings: where the weight comes in, and where the row is rounded ────────────────────────────────────────────


def ended(x: Tensor, h: Tensor, weight: Tensor, offset: float) -> Tensor:
    """gemma: the weight is stored less an offset of 1. olmo2: weight times row is float32 because the row is."""
    wide = torch.float32
    return choice(
        "ending",
        gemma=lambda: (h * (weight.to(wide) + offset)).to(x.dtype),
        llama=lambda: weight * h.to(x.dtype),
        olmo2=lambda: (constant(weight) * h).to(x.dtype),  # or a cast would be taken for the weight
        float_weight=lambda: (weight.to(wide) * h).to(x.dtype),
    )


def spelled(normalize: Normalize, name: str) -> Pattern:
    """The pattern of a normalization, under the name that reports show."""

    def pattern(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        return ended(x, normalize(x, eps), weight, offset)

    pattern.__name__ = name
    return pattern


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
