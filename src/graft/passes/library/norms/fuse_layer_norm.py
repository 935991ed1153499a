"""fuse_layer_norm: LayerNorm, called or spelled out, becomes one op."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.ir.patterns.match import Match
from graft.ir.patterns.words import choice, one_of
from graft.ops.layer_norm.reference import normalize
from graft.passes.library.norms.spellings import check_vectors
from graft.passes.patterns import PatternTransform, Rewrite
from graft.passes.registry import TransformRegistry

aten, ops = torch.ops.aten, torch.ops.graft
SHAPES = {"x": "b s d", "weight": "d", "bias": "d"}


# ── torch.layer_norm ────────────────────────────────────────────────────────────────────────────────────────────


def called(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def called_fused(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return ops.layer_norm(x, weight, bias, eps)


# ── spelled out ─────────────────────────────────────────────────────────────────────────────────────────────────


def spelled_out(form: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Pattern and replacement. The bias first: a norm with one holds a norm without. Cohere: float32 inside and a
    cast at the end."""

    def pattern(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
        def affine(h: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            y = w * normalize(h, eps, form)
            return y if b is None else y + b

        def inside(b: Tensor | None) -> Tensor:
            wide = torch.float32
            return choice(
                "inside",
                float32=lambda: affine(x.to(wide), weight.to(wide), None if b is None else b.to(wide)).to(x.dtype),
                working=lambda: affine(x, weight, b),
            )

        return one_of(lambda: inside(bias), lambda: inside(None))

    def fused(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None, inside: str) -> Tensor:
        return ops.layer_norm(x, weight, bias, eps, form, inside == "float32")

    pattern.__name__ = form
    return pattern, fused


def affine_is_vectors(match: Match) -> None:
    check_vectors(match, *(name for name in ("weight", "bias") if name in match.tensors))


def unbiased(h: Tensor, eps: float) -> Tensor:
    return (h - h.mean(-1, keepdim=True)) / torch.sqrt(h.var(-1, keepdim=True) + eps)


def unbiased_rsqrt(h: Tensor, eps: float) -> Tensor:
    return (h - h.mean(-1, keepdim=True)) * torch.rsqrt(h.var(-1, keepdim=True) + eps)


def unbiased_std(h: Tensor, eps: float) -> Tensor:
    return (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + eps)


NEEDS = {
    "mean_rsqrt": (aten.sub.Tensor, aten.mean.dim, aten.rsqrt.default),
    "mean_sqrt": (aten.sub.Tensor, aten.mean.dim, aten.sqrt.default, aten.div.Tensor),
    "var_rsqrt": (aten.sub.Tensor, aten.var.correction, aten.rsqrt.default),
    "var_sqrt": (aten.sub.Tensor, aten.var.correction, aten.sqrt.default, aten.div.Tensor),
}
REFUSALS = (
    (unbiased, (aten.sub.Tensor, aten.var.correction, aten.sqrt.default, aten.div.Tensor)),
    (unbiased_rsqrt, (aten.sub.Tensor, aten.var.correction, aten.rsqrt.default)),
    (unbiased_std, (aten.sub.Tensor, aten.std.correction, aten.div.Tensor)),
)
UNBIASED = "the variance is unbiased (a sum over n - 1 values), a LayerNorm's is not (n)"


REWRITES = (
    Rewrite(called, called_fused, SHAPES, needs=(aten.layer_norm.default,)),
    *(Rewrite(*spelled_out(form), SHAPES, affine_is_vectors, needs=needs) for form, needs in NEEDS.items()),
    *(Rewrite(wrong, wrong, {"h": "b s d"}, needs=needs, refuse=UNBIASED) for wrong, needs in REFUSALS),
)


@TransformRegistry.register("fuse_layer_norm")
class FuseLayerNorm(PatternTransform):
    """LayerNorm over the last dim, called or spelled out, becomes one op.

    before:  %y = layer_norm(%x, [d], %weight, %bias)
             or %m = mean(%x, [-1], True);  %c = sub(%x, %m);  %v = mean(pow(%c, 2), [-1], True);  %a = add(%v, eps)
                %h = mul(%c, rsqrt(%a));  %y = add(mul(%weight, %h), %bias)
    after:   %y = graft.layer_norm(%x, %weight, %bias, eps)

    Spelled out, it may divide by sqrt, take `var(unbiased=False)`, have no bias, and be float32 inside (Cohere).
    Numerics: bitwise with the reference, which knows how the model spelled it; kernels for spelled-out norms run on
    a GPU, are float32 inside and sum in another order.
    """

    def rewrites(self) -> Sequence[Rewrite]:
        return REWRITES
