"""fuse_activation_into_matvec: an activation without a gate becomes the epilogue of the GEMM before it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from graft.ir.nodes import is_op, options_of, where
from graft.ir.patterns.match import Match, Refused
from graft.ir.patterns.words import choice, one_of
from graft.passes.library.matvec.linears import FUSED, MatvecPatterns, check_weight, is_linear, linear
from graft.passes.patterns import Rewrite
from graft.passes.registry import TransformRegistry

aten, ops = torch.ops.aten, torch.ops.graft
ACTIVATIONS = (aten.gelu.default, aten.relu.default, aten.silu.default)


def called(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: Tensor | None = None, eps: float = 0.0,
    offset: float = 0.0, cast_last: bool = False,
) -> Tensor:  # fmt: skip
    y = linear(x, weight, bias, norm, eps, offset, cast_last)
    return choice(
        "activation",
        relu_squared=lambda: one_of(lambda: F.relu(y).pow(2), lambda: torch.square(F.relu(y))),
        gelu_tanh=lambda: F.gelu(y, approximate="tanh"),
        gelu=lambda: F.gelu(y),
        silu=lambda: F.silu(y),
        relu=lambda: F.relu(y),
    )


def fused(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float, offset: float, cast_last: bool,
    activation: str,
) -> Tensor:  # fmt: skip
    return ops.fused_linear(
        x, weight, bias, None, norm, eps, offset, cast_last, activation, False, None, False, 0, False
    )


def spelled_out(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: Tensor | None = None, eps: float = 0.0,
    offset: float = 0.0, cast_last: bool = False,
) -> Tensor:  # fmt: skip
    """GPT-2's gelu."""
    y = linear(x, weight, bias, norm, eps, offset, cast_last)
    return 0.5 * y * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))


def spelled_fused(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float, offset: float, cast_last: bool
) -> Tensor:
    return fused(x, weight, bias, norm, eps, offset, cast_last, "gelu_tanh")


def check_linear(match: Match) -> None:
    check_weight(next(node for node in match.nodes if is_linear(node)))


SHAPES = {"x": "b s k", "weight": "n k", "bias": "n", "norm": "k"}
SPELLED = (aten.tanh.default, aten.pow.Tensor_Scalar)
REWRITES = (
    Rewrite(called, fused, SHAPES, check_linear, exact=False, origin="weight"),
    Rewrite(spelled_out, spelled_fused, SHAPES, check_linear, needs=SPELLED, exact=False, origin="weight"),
)


@TransformRegistry.register("fuse_activation_into_matvec")
class FuseActivationIntoMatvec(MatvecPatterns):
    """An activation without a gate becomes the epilogue of the GEMM before it.

    before:  %y = linear(%x, %w, %b);  %a = gelu(%y, approximate="tanh")
    after:   %a = graft.fused_linear(%x, %w, %b, activation="gelu_tanh", glu=False)

    Also relu, relu squared, silu, gelu by erf, and gelu as GPT-2 spells it, eight kernels. Numerics: the reference
    rounds the result of the GEMM before the activation, as eager does, and then once, where GPT-2's spelling in 16
    bits rounds after each of its eight steps; a kernel may keep all of it in float32.
    """

    lacking = "no linear layer of the graph is followed by an activation alone"
    explained = ACTIVATIONS

    def rewrites(self) -> Sequence[Rewrite]:
        return REWRITES

    def explain(self, node: Node) -> None:
        """An activation of a linear layer that something else reads too, or that is added up first."""
        source: Any = node.args[0]
        if not is_linear(source):
            return
        check_weight(source)
        if is_op(source, FUSED) and options_of(source)["residual"] is not None:
            raise Refused(node, f"{where(source)} adds a residual, which comes after the activation")
        if len(source.users) > 1:
            raise Refused(node, f"{where(source)} is read by {len(source.users)} calls, and would be computed twice")
