"""fuse_layer_norm: LayerNorm, called or spelled out, becomes one op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.ir.patterns.match import Match
from graft.ops.layer_norm.reference import normalize
from graft.passes.library.norms.spellings import check_vectors
from graft.passes.patterns import PatternTransform, Rewrite
from graft.passes.registry import TransformRegistry

aten, ops = torch.ops.aten, torch.ops.graft
X, WEIGHT, BIAS = {"x": "b s d"}, {"weight": "d"}, {"bias": "d"}
DEFAULT_EPS = 1e-5  # torch's; the normal form leaves it out


# ── torch.layer_norm ────────────────────────────────────────────────────────────────────────────────────────────


def called(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def called_fused(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return ops.layer_norm(x, weight, bias, eps)


def called_default(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


def called_default_fused(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return ops.layer_norm(x, weight, bias, DEFAULT_EPS)


def called_no_bias(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, None, eps)


def called_no_bias_fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ops.layer_norm(x, weight, None, eps)


def called_no_bias_default(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight)


def called_no_bias_default_fused(x: Tensor, weight: Tensor) -> Tensor:
    return ops.layer_norm(x, weight, None, DEFAULT_EPS)


def called_bare(x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), None, None, eps)


def called_bare_fused(x: Tensor, eps: float) -> Tensor:
    return ops.layer_norm(x, None, None, eps)


def called_bare_default(x: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],))


def called_bare_default_fused(x: Tensor) -> Tensor:
    return ops.layer_norm(x, None, None, DEFAULT_EPS)


CALLS = (
    (called_default, called_default_fused, X | WEIGHT | BIAS),
    (called, called_fused, X | WEIGHT | BIAS),
    (called_no_bias_default, called_no_bias_default_fused, X | WEIGHT),
    (called_no_bias, called_no_bias_fused, X | WEIGHT),
    (called_bare_default, called_bare_default_fused, X),
    (called_bare, called_bare_fused, X),
)


# ── spelled out ─────────────────────────────────────────────────────────────────────────────────────────────────


def with_weight(form: str, upcast: bool) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Pattern and replacement. Cohere: float32 inside and a cast at the end (`upcast`)."""

    def pattern(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not upcast:
            return weight * normalize(x, eps, form)
        return (weight.to(torch.float32) * normalize(x.to(torch.float32), eps, form)).to(x.dtype)

    def fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return ops.layer_norm(x, weight, None, eps, form, upcast)

    return pattern, fused


def with_bias(form: str, upcast: bool) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def pattern(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        if not upcast:
            return weight * normalize(x, eps, form) + bias
        h = normalize(x.to(torch.float32), eps, form)
        return (weight.to(torch.float32) * h + bias.to(torch.float32)).to(x.dtype)

    def fused(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return ops.layer_norm(x, weight, bias, eps, form, upcast)

    return pattern, fused


def affine_is_vectors(names: tuple[str, ...], match: Match) -> None:
    check_vectors(match, *names)


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


def spelled_out() -> list[Rewrite]:
    """The bias first: a norm with one holds a norm without."""
    rewrites = []
    for make, shapes in ((with_bias, X | WEIGHT | BIAS), (with_weight, X | WEIGHT)):
        for form, needs in NEEDS.items():
            for upcast in (True, False):
                pattern, fused = make(form, upcast)
                pattern.__name__ = f"{make.__name__}_{form}{'_upcast' if upcast else ''}"
                check = partial(affine_is_vectors, tuple(name for name in shapes if name != "x"))
                rewrites.append(Rewrite(pattern, fused, shapes, check, needs=needs))
    return rewrites


REWRITES = (
    *(Rewrite(pattern, fused, shapes, needs=(aten.layer_norm.default,)) for pattern, fused, shapes in CALLS),
    *spelled_out(),
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
