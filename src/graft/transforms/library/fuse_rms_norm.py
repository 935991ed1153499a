"""fuse_rms_norm: the spelled-out RMSNorm becomes one op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graft.graph.match import Match
from graft.graph.nodes import is_weight, tensor_val, where
from graft.transforms.base import PatternTransform, Rewrite
from graft.transforms.registry import TransformRegistry


def llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def llama_fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.ops.graft.rms_norm(x, weight, eps)


def olmo2(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * h).to(x.dtype)


def olmo2_fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.ops.graft.rms_norm(x, weight, eps, 0.0, True)


def gemma(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (h * (weight.to(torch.float32) + offset)).to(x.dtype)


def gemma_fused(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return torch.ops.graft.rms_norm(x, weight, eps, offset, True)


def weight_is_a_vector(match: Match) -> str | None:
    weight, x = tensor_val(match.tensors["weight"]), tensor_val(match.tensors["x"])
    if weight is None or x is None or weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        return "the weight is not one value a channel"
    if not is_weight(match.tensors["weight"]):
        return f"the weight {where(match.tensors['weight'])} is computed in the graph, it is not a parameter"
    return None


aten = torch.ops.aten
NEEDS = (aten.rsqrt.default, aten.mean.dim)
SHAPES = {"x": "b s d", "weight": "d"}


@TransformRegistry.register("fuse_rms_norm")
class FuseRMSNorm(PatternTransform):
    """The spelled-out RMSNorm becomes one op.

    before:  %p = pow(%x, 2);  %m = mean(%p, [-1], True);  %a = add(%m, eps);  %r = rsqrt(%a)
             %h = mul(%x, %r);  %y = mul(%weight, %h)
    after:   %y = graft.rms_norm(%x, %weight, eps)

    The weight may stand left or right, be cast before or after, or have an offset (Gemma's 1 + w). Numerics:
    bitwise with the reference; the Triton kernel sums the squares in another order (float32).
    """

    def rewrites(self) -> Sequence[Rewrite]:
        return [
            Rewrite(
                gemma, gemma_fused, SHAPES, weight_is_a_vector, needs=NEEDS
            ),  # first: 1 + w also looks like a weight
            Rewrite(llama, llama_fused, SHAPES, weight_is_a_vector, needs=NEEDS),
            Rewrite(olmo2, olmo2_fused, SHAPES, weight_is_a_vector, needs=NEEDS),
        ]
