"""fuse_layer_norm_into_matvec: a LayerNorm becomes the prologue of the linear layers that read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from graft.ir.nodes import is_op, options_of, where
from graft.ir.patterns.match import Match, Refused
from graft.ir.patterns.words import constant, one_of
from graft.passes.library.matvec.fuse_norm_into_matvec import check_readers, check_taken
from graft.passes.library.matvec.linears import FUSED, LINEAR, MatvecPatterns
from graft.passes.patterns import Rewrite
from graft.passes.registry import TransformRegistry

ops = torch.ops.graft
NORM = ops.layer_norm.default


def normed(
    x: Tensor, norm: Tensor, norm_bias: Tensor | None, eps: float, form: str
) -> Tensor:  # fmt: skip
    """As torch rounds it, or the model in float32: after every step a prologue could not."""
    return one_of(
        lambda: ops.layer_norm(x, norm, norm_bias, eps),
        lambda: ops.layer_norm(x, norm, norm_bias, eps, form, True),
    )


def normed_linear(
    x: Tensor, weight: Tensor, norm: Tensor, eps: float,
    form: Literal["fused", "mean_rsqrt", "mean_sqrt", "var_rsqrt", "var_sqrt"] = "fused",
    norm_bias: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return F.linear(normed(x, norm, norm_bias, eps, form), constant(weight), bias)


def linear_fused(
    x: Tensor, weight: Tensor, norm: Tensor, eps: float, form: str, norm_bias: Tensor | None, bias: Tensor | None  # noqa: ARG001
) -> Tensor:  # fmt: skip
    return ops.fused_linear(x, weight, bias, None, norm, eps, norm_bias=norm_bias, center=True)


def normed_mlp(
    x: Tensor, weight: Tensor, norm: Tensor, eps: float,
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"], glu: bool,
    form: Literal["fused", "mean_rsqrt", "mean_sqrt", "var_rsqrt", "var_sqrt"] = "fused",
    norm_bias: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    h = normed(x, norm, norm_bias, eps, form)
    return ops.fused_linear(
        h, constant(weight), bias, None, None, 0.0, 0.0, False, activation, False, None, False, 0, glu
    )


def mlp_fused(
    x: Tensor, weight: Tensor, norm: Tensor, eps: float, activation: str, glu: bool, form: str,  # noqa: ARG001
    norm_bias: Tensor | None, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    return ops.fused_linear(
        x, weight, bias, None, norm, eps, 0.0, False, activation, False, None, False, 0, glu, 1.0, norm_bias, True
    )


def check_norm(match: Match) -> None:
    check_taken(match, next(node for node in match.nodes if is_op(node, NORM)))


SHAPES = {"x": "b s k", "weight": "n k", "norm": "k", "norm_bias": "k", "bias": "n"}
OPTIONS = {"check": check_norm, "allow_readers": True, "exact": False}
REWRITES = (
    Rewrite(normed_linear, linear_fused, SHAPES, needs=((LINEAR, NORM),), **OPTIONS),
    Rewrite(normed_mlp, mlp_fused, SHAPES, needs=((FUSED, NORM),), **OPTIONS),
)


@TransformRegistry.register("fuse_layer_norm_into_matvec")
class FuseLayerNormIntoMatvec(MatvecPatterns):
    """A LayerNorm becomes the prologue of the linear layers that read it, and is gone.

    before:  %n = graft.layer_norm(%x, %g, %b, eps);  %y = linear(%n, %w)
    after:   %y = graft.fused_linear(%x, %w, norm=%g, eps=eps, norm_bias=%b, center=True)

    A decode step needs no pass over x before that of the GEMM: (W (g x) - mean W g) / deviation + W b, of which all
    but the first is known from the weights. Steps of more tokens norm first. Up to three linear layers may read it.
    Numerics: the reference is norm and GEMM one after the other; a kernel may keep the normed values in float32.
    """

    lacking = "the graph has no graft::layer_norm"
    explained = (NORM,)

    def rewrites(self) -> Sequence[Rewrite]:
        return REWRITES

    def explain(self, node: Node) -> None:
        given = options_of(node)
        if given["form"] != "fused" and not given["upcast"]:
            raise Refused(node, f"{where(node)} rounds after every step, and a prologue once")
        check_readers(node, list(node.users))
