"""fuse_rms_norm: RMSNorm, whatever its spelling, becomes one op."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from graft.ir.nodes import tensor_val
from graft.ir.patterns.match import Match, Refused
from graft.passes.library.norms import spellings as say
from graft.passes.patterns import PatternTransform, Rewrite
from graft.passes.registry import TransformRegistry


def llama_fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.ops.graft.rms_norm(x, weight, eps)


def olmo2_fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.ops.graft.rms_norm(x, weight, eps, 0.0, True)


def rounded_fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.ops.graft.rms_norm(x, weight, eps, 0.0, False, weight.dtype)


def gemma_fused(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return torch.ops.graft.rms_norm(x, weight, eps, offset, True)


def call(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.rms_norm(x, (x.shape[-1],), weight, eps)


def call_without_eps(x: Tensor, weight: Tensor) -> Tensor:
    return torch.rms_norm(x, (x.shape[-1],), weight)


def call_without_eps_fused(x: Tensor, weight: Tensor) -> Tensor:
    # torch takes the epsilon of the dtype it computes in, which is float32 for 16-bit inputs too
    return torch.ops.graft.rms_norm(x, weight, torch.finfo(torch.float32).eps, 0.0, True)


def call_without_weight(x: Tensor, eps: float) -> Tensor:
    return torch.rms_norm(x, (x.shape[-1],), None, eps)


def call_bare(x: Tensor) -> Tensor:
    return torch.rms_norm(x, (x.shape[-1],))


def weight_before_row(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (weight * x) * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)


def weight_is_a_vector(match: Match) -> None:
    x = tensor_val(match.tensors["x"])
    if x is not None and x.dtype == torch.float64:
        raise Refused(match.anchor, "x is float64, and the op computes in float32")
    say.check_vectors(match, "weight")


aten = torch.ops.aten
MEAN, SUM, DIV = aten.mean.dim, aten.sum.dim_IntList, aten.div.Tensor
RSQRT, SQRT, RECIPROCAL = aten.rsqrt.default, aten.sqrt.default, aten.reciprocal.default
SHAPES = {"x": "b s d", "weight": "d"}
WIDE = {"x": "b s d : float32", "weight": "d"}
NO_WEIGHT = "the norm has no weight, and graft::rms_norm needs one"
# how the weight comes in, and the op for it; offsets first: 1 + w also looks like a weight
ENDINGS: tuple[tuple[str, Callable[..., say.Pattern], Callable[..., Tensor]], ...] = (
    ("gemma", say.offset_weight_then_cast, gemma_fused),
    ("llama", say.cast_then_weight, llama_fused),
    ("olmo2", say.weight_then_cast, olmo2_fused),
    ("float_weight", say.float_weight_then_cast, olmo2_fused),
)
PLAIN = say.normalization(say.mean_square, say.times_rsqrt)
# how the row is normalized, what that needs, and whether rsqrt of the mean gives the same bits
NORMALIZATIONS: tuple[tuple[str, say.Normalize, tuple[object, ...], bool], ...] = (
    ("", PLAIN, (RSQRT, MEAN), True),
    ("_promoted", say.promoted, (RSQRT, MEAN), True),
    ("_division", say.normalization(say.mean_square, say.over_sqrt), (SQRT, DIV, MEAN), False),
    ("_reciprocal", say.normalization(say.mean_square, say.times_reciprocal), (SQRT, RECIPROCAL, MEAN), False),
    ("_sum", say.normalization(say.sum_square, say.times_rsqrt), (RSQRT, SUM), False),
    ("_sum_division", say.normalization(say.sum_square, say.over_sqrt), (SQRT, SUM), False),
)


def spelled_out() -> list[Rewrite]:
    """Common spellings first: when they have taken all norms, the ops that the others need are gone."""
    rewrites = []
    for suffix, normalize, needs, exact in NORMALIZATIONS:
        for name, ending, fused in ENDINGS if normalize is PLAIN else ENDINGS[:3]:
            pattern = say.spelled(ending, normalize, name + suffix)
            rewrites.append(Rewrite(pattern, fused, SHAPES, weight_is_a_vector, needs=needs, exact=exact))
    rounded = say.spelled(say.rounded_then_weight, PLAIN, "rounded")
    rewrites.append(Rewrite(rounded, rounded_fused, WIDE, weight_is_a_vector, needs=(RSQRT, MEAN, aten.to.dtype)))
    for name, ending, fused in ENDINGS:
        pattern = say.without_eps(say.spelled(ending, PLAIN, name))
        rewrites.append(Rewrite(pattern, say.without_eps(fused), SHAPES, weight_is_a_vector, needs=(RSQRT, MEAN)))
    return rewrites


def calls_of_torch() -> list[Rewrite]:
    needs = (aten.rms_norm.default,)
    bare = {"x": "b s d"}
    return [
        Rewrite(call_without_weight, call_without_weight, bare, needs=needs, refuse=NO_WEIGHT),
        Rewrite(call_bare, call_bare, bare, needs=needs, refuse=NO_WEIGHT),
        Rewrite(call, olmo2_fused, SHAPES, weight_is_a_vector, needs=needs),
        Rewrite(call_without_eps, call_without_eps_fused, SHAPES, weight_is_a_vector, needs=needs),
    ]


REWRITES = (
    *spelled_out(),
    *calls_of_torch(),
    Rewrite(
        weight_before_row,
        weight_before_row,
        SHAPES,
        needs=(RSQRT, MEAN),
        refuse="the weight multiplies x before the row is normalized, which rounds elsewhere than graft::rms_norm",
    ),
)
llama = next(r.pattern for r in REWRITES if r.pattern.__name__ == "llama")  # what benchmarks time the matcher with


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
