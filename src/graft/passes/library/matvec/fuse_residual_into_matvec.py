"""fuse_residual_into_matvec: the residual sum after a linear layer becomes its epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from graft.ir.nodes import is_op, options_of, same_shape, tensor_of, tensor_val, where
from graft.ir.patterns.match import Match, Refused
from graft.ir.patterns.words import constant, one_of, optional
from graft.passes.library.matvec.linears import LINEAR, MatvecPatterns, check_weight, is_linear, named
from graft.passes.patterns import Rewrite
from graft.passes.registry import TransformRegistry

aten, ops = torch.ops.aten, torch.ops.graft
ADD, MUL, ADD_NORM = aten.add.Tensor, aten.mul.Tensor, ops.add_rms_norm.default
# what stands between a linear layer and the sum in some models, and how to say so
BETWEEN = {
    ops.rms_norm.default: "norms the GEMM's result before it is added",
    ops.layer_norm.default: "norms the GEMM's result before it is added",
    aten.mul.Tensor: "scales the GEMM's result, by no number of its own, before it is added",
    aten.div.Tensor: "scales the GEMM's result before it is added",
    aten.to.dtype: "casts the GEMM's result before it is added",
    aten.reshape.default: "reshapes the GEMM's result before it is added",
    aten.index_select.default: "selects rows of the GEMM's result before it is added",
}
TRANSPOSED = (aten.addmm.default, aten.mm.default)


def add(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, constant(weight), bias) + residual


def add_fused(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None) -> Tensor:
    return ops.fused_linear(x, weight, bias, residual=residual)


def add_rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor, eps: float, offset: float, cast_last: bool,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y = F.linear(x, constant(weight), bias)
    summands = one_of(lambda: (y, residual), lambda: (residual, y))
    normed, total = ops.add_rms_norm(*summands, norm, eps, offset, cast_last)
    return normed, optional(lambda: total)


def add_rms_norm_fused(
    x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor, eps: float, offset: float, cast_last: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    total = ops.fused_linear(x, weight, bias, residual=residual)
    return ops.rms_norm(total, norm, eps, offset, cast_last), total


def scaled(
    x: Tensor, weight: Tensor, residual: Tensor, alpha: float, bias: Tensor | None = None
) -> Tensor:  # fmt: skip
    return F.linear(x, constant(weight), bias) * alpha + residual


def scaled_fused(x: Tensor, weight: Tensor, residual: Tensor, alpha: float, bias: Tensor | None) -> Tensor:
    return ops.fused_linear(x, weight, bias, residual=residual, alpha=alpha)


def scaled_rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor, alpha: float, norm: Tensor, eps: float, offset: float,
    cast_last: bool, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y = F.linear(x, constant(weight), bias) * alpha
    summands = one_of(lambda: (y, residual), lambda: (residual, y))
    normed, total = ops.add_rms_norm(*summands, norm, eps, offset, cast_last)
    return normed, optional(lambda: total)


def scaled_rms_norm_fused(
    x: Tensor, weight: Tensor, residual: Tensor, alpha: float, norm: Tensor, eps: float, offset: float,
    cast_last: bool, bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    total = scaled_fused(x, weight, residual, alpha, bias)
    return ops.rms_norm(total, norm, eps, offset, cast_last), total


def check_sum(match: Match) -> None:
    linear = next(node for node in match.nodes if is_op(node, LINEAR))
    residual = match.tensors["residual"]
    check_weight(linear)
    y, r = tensor_of(linear), tensor_of(residual)
    if not same_shape(y, r):
        raise Refused(residual, f"the residual {where(residual)} is broadcast to the GEMM's result")
    if y.dtype != r.dtype:
        raise Refused(residual, f"the residual {where(residual)} is {r.dtype}, the GEMM's result {y.dtype}")


SHAPES = {"x": "b s k", "weight": "n k", "residual": "b s n", "bias": "n"}
REWRITES = (
    Rewrite(
        add_rms_norm,
        add_rms_norm_fused,
        SHAPES | {"norm": "n"},
        check_sum,
        needs=((ADD_NORM, LINEAR),),
        origin="weight",
    ),
    Rewrite(add, add_fused, SHAPES, check_sum, needs=((ADD, LINEAR),), origin="weight"),
    Rewrite(
        scaled_rms_norm,
        scaled_rms_norm_fused,
        SHAPES | {"norm": "n"},
        check_sum,
        needs=((ADD_NORM, MUL), (MUL, LINEAR)),
        origin="weight",
    ),
    Rewrite(scaled, scaled_fused, SHAPES, check_sum, needs=((ADD, MUL), (MUL, LINEAR)), origin="weight"),
)


@TransformRegistry.register("fuse_residual_into_matvec")
class FuseResidualIntoMatvec(MatvecPatterns):
    """The residual sum after a linear layer becomes its epilogue; a norm fused with the sum stands alone again.

    before:  %y = linear(%a, %w);  %n, %x = graft.add_rms_norm(%y, %r, %g, eps)
    after:   %x = graft.fused_linear(%a, %w, residual=%r);  %n = graft.rms_norm(%x, %g, eps)

    Also a plain `add(%y, %r)`, in either order, a linear layer with a bias, and one whose result is multiplied by a
    number first (Granite), which becomes alpha. Numerics: the reference rounds the GEMM's result, then its multiple,
    then the sum, as eager does; a kernel may add before it rounds, once.
    """

    lacking = "no linear layer of the graph is followed by a sum"
    explained = (ADD, ADD_NORM)

    def rewrites(self) -> Sequence[Rewrite]:
        return REWRITES

    def explain(self, node: Node) -> None:
        """Where a linear layer is near, or a norm was fused with the sum; any other sum is none of a residual."""
        summands = node.args[:2]
        if not all(isinstance(value, Node) and tensor_val(value) is not None for value in summands):
            return
        linears = [value for value in summands if is_linear(value)]
        if linears:
            explain_linear(node, max(linears))
            return
        for value in summands:
            explain_summand(node, value)
        if is_op(node, ADD_NORM):
            raise Refused(node, f"neither {named(summands[0])} nor {named(summands[1])} is a linear layer")


def explain_linear(total: Node, linear: Node) -> None:
    """Why the sum of a linear layer is none of its epilogue, where the pattern cannot say it so well."""
    if is_op(total, ADD) and total.kwargs:
        raise Refused(total, f"{where(total)} adds a multiple (alpha)")
    if is_op(total, ADD_NORM) and options_of(total)["wide"]:
        raise Refused(total, f"{where(total)} norms the sum before it is rounded, and the GEMM gives it rounded")
    check_weight(linear)


def explain_summand(total: Node, value: Node) -> None:
    source: Any = value
    while is_op(source, *BETWEEN):
        source = source.args[0]
    if list(value.users) != [total]:
        return
    if is_linear(source):
        raise Refused(value, f"{named(value)}, {BETWEEN[value.target]}")
    if is_op(source, *TRANSPOSED):
        raise Refused(value, f"{where(value)} comes from a GEMM with a [k, n] weight; fused_linear reads [n, k]")
