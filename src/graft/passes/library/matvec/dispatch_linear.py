"""dispatch_linear: a linear layer that nothing was fused into gets a kernel by measurement all the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.ir.nodes import is_op
from graft.ir.patterns.match import Match
from graft.ir.patterns.words import constant
from graft.passes.library.matvec.linears import LINEAR, MatvecPatterns, check_weight
from graft.passes.patterns import Rewrite
from graft.passes.registry import TransformRegistry

ops = torch.ops.graft


def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, constant(weight), bias)


def dispatched(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return ops.fused_linear(x, weight, bias)


def check_matrix(match: Match) -> None:
    check_weight(next(node for node in match.nodes if is_op(node, LINEAR)))


SHAPES = {"x": "b s k", "weight": "n k", "bias": "n"}
REWRITES = (Rewrite(plain, dispatched, SHAPES, check_matrix, needs=(LINEAR,)),)


@TransformRegistry.register("dispatch_linear")
class DispatchLinear(MatvecPatterns):
    """A linear layer that nothing was fused into becomes the op whose kernel is chosen by measurement.

    before:  %y = linear(%x, %w, %b)
    after:   %y = graft.fused_linear(%x, %w, %b)

    torch's GEMM of one row leaves a third of the memory's speed: Granite's down projection took 13.2 µs of an H200
    instead of 8.9, and the kernel behind it could not start early. Steps of many tokens run torch's GEMM as before.
    Numerics: the reference is the linear layer, bitwise.
    """

    lacking = "the graph has no linear layer by itself"

    def rewrites(self) -> Sequence[Rewrite]:
        return REWRITES
