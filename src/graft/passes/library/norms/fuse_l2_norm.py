"""fuse_l2_norm: a row divided by its length becomes one op."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.ir.nodes import tensor_val
from graft.ir.patterns.match import Match, Refused
from graft.ir.patterns.words import one_of, optional
from graft.passes.library.norms.spellings import mean_square, over_sqrt, times_rsqrt
from graft.passes.patterns import PatternTransform, Rewrite
from graft.passes.registry import TransformRegistry

aten = torch.ops.aten
Pattern = Callable[..., Tensor]
Length = Callable[[Tensor], Tensor]
LENGTH, SUM, MEAN = aten.linalg_vector_norm.default, aten.sum.dim_IntList, aten.mean.dim
RSQRT, SQRT, DIV = aten.rsqrt.default, aten.sqrt.default, aten.div.Tensor
SHAPES = {"x": "b s d"}


# ── spellings ───────────────────────────────────────────────────────────────────────────────────────────────────


def sum_square(h: Tensor) -> Tensor:
    return h.pow(2).sum(-1, keepdim=True)


def vector_norm(h: Tensor) -> Tensor:
    return torch.linalg.vector_norm(h, dim=-1, keepdim=True)


def root_of_sum(h: Tensor) -> Tensor:
    return torch.sqrt(sum_square(h))


def under_root(square: Length, scale: Callable[[Tensor, Tensor], Tensor]) -> Pattern:
    """eps is added under the root, or is 0: the normal form leaves that addition out."""

    def spelling(x: Tensor, eps: float) -> Tensor:
        v = square(x)
        return scale(x, optional(lambda: v + eps, v))

    return spelling


def least(length: Length) -> Pattern:
    """eps is the least divisor."""
    return lambda x, eps: x / one_of(lambda: length(x).clamp_min(eps), lambda: length(x).clamp(min=eps))


def least_of_length(x: Tensor, eps: float) -> Tensor:
    return one_of(lambda: F.normalize(x, dim=-1, eps=eps), lambda: least(vector_norm)(x, eps))


def added_to_length(x: Tensor, eps: float) -> Tensor:
    length = vector_norm(x)
    return x / optional(lambda: length + eps, length)


def added_to_root(x: Tensor, eps: float) -> Tensor:
    return x / (root_of_sum(x) + eps)  # with eps 0 it is over_root_of_sum


# name, spelling, form of the op, what the graph must have, and whether the op gives the same bits in float32
SPELLINGS: tuple[tuple[str, Pattern, str, tuple[object, ...], bool], ...] = (
    ("rsqrt_of_sum", under_root(sum_square, times_rsqrt), "sum", (RSQRT, SUM), True),
    ("over_root_of_sum", under_root(sum_square, over_sqrt), "sum", (SQRT, SUM, DIV), False),
    ("rsqrt_of_mean", under_root(mean_square, times_rsqrt), "mean", (RSQRT, MEAN), True),
    ("over_root_of_mean", under_root(mean_square, over_sqrt), "mean", (SQRT, MEAN, DIV), False),
    ("over_least_length", least_of_length, "max", (LENGTH, DIV), True),
    ("over_least_root", least(root_of_sum), "max", (SQRT, SUM, DIV), False),
    ("over_length_plus", added_to_length, "plus", (LENGTH, DIV), True),
    ("over_root_plus", added_to_root, "plus", (SQRT, SUM, DIV), False),
)


def in_float32(spelling: Pattern) -> Pattern:
    return lambda x, eps: spelling(x.to(torch.float32), eps).to(x.dtype)


def pattern_of(name: str, spelling: Pattern) -> Pattern:
    def pattern(x: Tensor, eps: float = 0.0) -> Tensor:
        return spelling(x, eps)

    pattern.__name__ = name
    return pattern


def fused(form: str) -> Pattern:
    return pattern_of("l2_norm", lambda x, eps: torch.ops.graft.l2_norm(x, eps, form))


def not_float64(match: Match) -> None:
    x = tensor_val(match.tensors["x"])
    if x is not None and x.dtype == torch.float64:
        raise Refused(match.anchor, "x is float64, and the op computes in float32")


def all_rewrites() -> list[Rewrite]:
    rewrites = []
    for name, spelling, form, needs, exact in SPELLINGS:
        # in the row's own dtype every step rounds, in the op the last one alone
        for suffix, spelled, same in (("", in_float32(spelling), exact), ("_unwidened", spelling, False)):
            pattern = pattern_of(name + suffix, spelled)
            rewrites.append(Rewrite(pattern, fused(form), SHAPES, not_float64, needs=needs, exact=same))
    return rewrites


REWRITES = tuple(all_rewrites())


@TransformRegistry.register("fuse_l2_norm")
class FuseL2Norm(PatternTransform):
    """A row divided by its length becomes one op; a norm without a weight (Llama 4) is one too.

    before:  %p = pow(%x, 2);  %s = sum(%p, [-1], True);  %a = add(%s, eps);  %r = rsqrt(%a);  %y = mul(%x, %r)
    after:   %y = graft.l2_norm(%x, eps)

    Also F.normalize and what else divides by a norm or by the root of a sum, with eps under the root, added, or as
    the least divisor. Numerics: bitwise with the reference where the model computes in float32 with the calls of the
    reference; a division by sqrt may be a rounding of float32 off. Where a 16-bit row is squared and summed in 16
    bits, the op rounds once instead of at every step. The Triton kernel sums in another order (float32).
    """

    def rewrites(self) -> Sequence[Rewrite]:
        return REWRITES
