"""fuse_rope: the spelled-out rotary embedding becomes one op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graft.graph.match import Match
from graft.graph.nodes import tensor_val
from graft.transforms.base import PatternTransform, Rewrite
from graft.transforms.registry import TransformRegistry


def full(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return (x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin).to(x.dtype)


def partial(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    r = cos.shape[-1]
    turning = x[..., :r]
    half = r // 2
    turned = torch.cat((-turning[..., half:], turning[..., :half]), dim=-1)
    return torch.cat(((turning * cos + turned * sin).to(x.dtype), x[..., r:]), dim=-1)


def fused(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.ops.graft.rope(x, cos, sin)


def one_angle_a_token(match: Match) -> str | None:
    x, cos, sin = (tensor_val(match.tensors[name]) for name in ("x", "cos", "sin"))
    if x is None or cos is None or sin is None or x.dim() != 4 or cos.dim() != 4 or sin.dim() != 4:
        return "the op takes x [b, h, s, d] and cos, sin [b, 1, s, r]"
    if cos.shape[1] != 1 or sin.shape[1] != 1:
        return "cos and sin differ between heads"
    turning = x.shape[-1] if match.pattern == "full" else cos.shape[-1]
    return None if cos.shape[-1] == sin.shape[-1] == turning else "cos or sin is broadcast over the head"


NEEDS = (torch.ops.aten.neg.default, torch.ops.aten.cat.default)


@TransformRegistry.register("fuse_rope")
class FuseRoPE(PatternTransform):
    """The spelled-out, half-rotated rotary embedding becomes one op, for queries and keys each.

    before:  %a = mul(%x, %cos);  %hi = slice(%x, -1, d/2, d);  %n = neg(%hi);  %lo = slice(%x, -1, 0, d/2)
             %c = cat([%n, %lo], -1);  %b = mul(%c, %sin);  %y = add(%a, %b)
    after:   %y = graft.rope(%x, %cos, %sin)

    Also where only the first r values of a head turn, and where cos and sin are float32 beside 16-bit heads and the
    result is cast back (OLMo 2). Numerics: bitwise with the reference; the Triton kernel rounds where eager does.
    """

    def rewrites(self) -> Sequence[Rewrite]:
        return [
            Rewrite(
                partial,
                fused,
                {"x": "b h s r+6", "cos": "b 1 s r : float32", "sin": "b 1 s r : float32"},
                one_angle_a_token,
                needs=NEEDS,
            ),
            Rewrite(
                full,
                fused,
                {"x": "b h s d", "cos": "b 1 s d : float32", "sin": "b 1 s d : float32"},
                one_angle_a_token,
                needs=NEEDS,
            ),
        ]
