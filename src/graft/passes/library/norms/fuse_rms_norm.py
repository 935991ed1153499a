"""fuse_rms_norm: RMSNorm, whatever its spelling, becomes one op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graft.ir.nodes import tensor_val
from graft.ir.patterns.match import Match, Refused
from graft.passes.library.norms import spellings as say
from graft.passes.patterns import PatternTransform, Rewrite
from graft.passes.registry import TransformRegistry

aten, ops = torch.ops.aten, torch.ops.graft


def fused(x: Tensor, weight: Tensor, eps: float, offset: float, ending: str) -> Tensor:
    return ops.rms_norm(x, weight, eps, offset, ending != "llama")


def without_eps(x: Tensor, weight: Tensor, offset: float = 0.0) -> Tensor:
    """eps 0, whose addition the normal form leaves out."""
    return say.ended(x, PLAIN(x, 0.0), weight, offset)


def without_eps_fused(x: Tensor, weight: Tensor, offset: float, ending: str) -> Tensor:
    return fused(x, weight, 0.0, offset, ending)


def rounded(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Llama on a float32 row (gated by Mamba, or a sum that was not rounded): it is rounded to the weight's dtype."""
    return weight * PLAIN(x, eps).to(weight.dtype)


def rounded_fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ops.rms_norm(x, weight, eps, 0.0, False, weight.dtype)


def call(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    return torch.rms_norm(x, (x.shape[-1],), weight, eps)


def call_fused(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    # torch takes the epsilon of the dtype it computes in, which is float32 for 16-bit inputs too
    return ops.rms_norm(x, weight, torch.finfo(torch.float32).eps if eps is None else eps, 0.0, True)


def call_bare(x: Tensor, eps: float | None) -> Tensor:
    return torch.rms_norm(x, (x.shape[-1],), None, eps)


def weight_before_row(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (weight * x) * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)


def weight_is_a_vector(match: Match) -> None:
    x = tensor_val(match.tensors["x"])
    if x is not None and x.dtype == torch.float64:
        raise Refused(match.anchor, "x is float64, and the op computes in float32")
    say.check_vectors(match, "weight")


CALL = (aten.rms_norm.default,)
MEAN, SUM, DIV = aten.mean.dim, aten.sum.dim_IntList, aten.div.Tensor
RSQRT, SQRT, RECIPROCAL = aten.rsqrt.default, aten.sqrt.default, aten.reciprocal.default
SHAPES = {"x": "b s d", "weight": "d"}
WIDE = {"x": "b s d : float32", "weight": "d"}
NO_WEIGHT = "the norm has no weight, and graft::rms_norm needs one"
# how the weight comes in, and the op for it; offsets first: 1 + w also looks like a weight
PLAIN = say.normalization(say.mean_square, say.times_rsqrt)
# how the row is normalized, what that needs, and whether rsqrt of the mean gives the same bits. Common spellings
# first: when they have taken all norms, the ops that the others need are gone
NORMALIZATIONS: tuple[tuple[str, say.Normalize, tuple[object, ...], bool], ...] = (
    ("rms_norm", PLAIN, (RSQRT, MEAN), True),
    ("promoted", say.promoted, (RSQRT, MEAN), True),
    ("division", say.normalization(say.mean_square, say.over_sqrt), (SQRT, DIV, MEAN), False),
    ("reciprocal", say.normalization(say.mean_square, say.times_reciprocal), (SQRT, RECIPROCAL, MEAN), False),
    ("sum", say.normalization(say.sum_square, say.times_rsqrt), (RSQRT, SUM), False),
    ("sum_division", say.normalization(say.sum_square, say.over_sqrt), (SQRT, SUM), False),
)
REWRITES = (
    *(
        Rewrite(say.spelled(normalize, name), fused, SHAPES, weight_is_a_vector, needs=needs, exact=exact)
        for name, normalize, needs, exact in NORMALIZATIONS
    ),
    Rewrite(rounded, rounded_fused, WIDE, weight_is_a_vector, needs=(RSQRT, MEAN, aten.to.dtype)),
    Rewrite(without_eps, without_eps_fused, SHAPES, weight_is_a_vector, needs=(RSQRT, MEAN)),
    Rewrite(call_bare, call_bare, {"x": "b s d"}, needs=CALL, refuse=NO_WEIGHT),
    Rewrite(call, call_fused, SHAPES, weight_is_a_vector, needs=CALL),
    Rewrite(
        weight_before_row,
        weight_before_row,
        SHAPES,
        needs=(RSQRT, MEAN),
        refuse="the weight multiplies x before the row is normalized, which rounds elsewhere than graft::rms_norm",
    ),
)
rms_norm = REWRITES[0].pattern  # what benchmarks time the matcher with


@TransformRegistry.register("fuse_rms_norm")
class FuseRMSNorm(PatternTransform):
    """RMSNorm, whatever its spelling, becomes one op.

    before:  %p = pow(%x, 2);  %m = mean(%p, [-1], True);  %a = add(%m, eps);  %r = rsqrt(%a)
             %h = mul(%x, %r);  %y = mul(%weight, %h)
    after:   %y = graft.rms_norm(%x, %weight, eps)

    The weight may stand left or right, be cast before or after, or have an offset (Gemma's 1 + w); eps may be 0; the
    norm may be torch.rms_norm. A float32 row that is rounded before the weight (a gated norm in 16 bits) is told its
    `dtype`. Numerics: bitwise with the reference where the model says rsqrt and mean, or calls
    torch.rms_norm. Spelled as 1 / sqrt, as a division by sqrt, or as sum / d, the op's rsqrt and mean may be a
    rounding of float32 off. The Triton kernel sums the squares in another order (float32).
    """

    def rewrites(self) -> Sequence[Rewrite]:
        return REWRITES
