"""fuse_swiglu_into_matvec: the gated activation becomes the epilogue of the gate-up GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from graft.passes.library.matvec.linears import MatvecPatterns, linear
from graft.passes.patterns import Rewrite
from graft.passes.registry import TransformRegistry

ops = torch.ops.graft


def gated(
    x: Tensor, weight: Tensor, activation: Literal["silu", "gelu", "gelu_tanh", "relu_squared", "relu"], upcast: bool,
    bias: Tensor | None = None, norm: Tensor | None = None, eps: float = 0.0, offset: float = 0.0,
    cast_last: bool = False,
) -> Tensor:  # fmt: skip
    gate, up = linear(x, weight, bias, norm, eps, offset, cast_last).chunk(2, -1)
    return ops.swiglu(gate, up, activation, upcast)


def gate_last(
    x: Tensor, weight: Tensor, activation: Literal["silu", "gelu", "gelu_tanh", "relu_squared", "relu"], upcast: bool,
    bias: Tensor | None = None, norm: Tensor | None = None, eps: float = 0.0, offset: float = 0.0,
    cast_last: bool = False,
) -> Tensor:  # fmt: skip
    up, gate = linear(x, weight, bias, norm, eps, offset, cast_last).chunk(2, -1)
    return ops.swiglu(gate, up, activation, upcast)


def gated_fused(
    x: Tensor, weight: Tensor, activation: str, upcast: bool, bias: Tensor | None, norm: Tensor | None, eps: float,
    offset: float, cast_last: bool,
) -> Tensor:  # fmt: skip
    return ops.fused_linear(x, weight, bias, None, norm, eps, offset, cast_last, activation, upcast)


SHAPES = {"x": "b s k", "weight": "2*n k", "bias": "2*n", "norm": "k"}
NEEDS = (ops.swiglu.default,)
SECOND = "the GEMM gives the gate in its second half; fused_linear reads it in the first"
REWRITES = (
    Rewrite(gated, gated_fused, SHAPES, needs=NEEDS, exact=False, near=1),
    Rewrite(gate_last, gated_fused, SHAPES, needs=NEEDS, refuse=SECOND),
)


@TransformRegistry.register("fuse_swiglu_into_matvec")
class FuseSwigluIntoMatvec(MatvecPatterns):
    """The gated activation becomes the epilogue of the gate-up GEMM.

    before:  %y = linear(%x, %w);  %g = slice(%y, -1, 0, n);  %u = slice(%y, -1, n, 2n);  %a = graft.swiglu(%g, %u)
    after:   %a = graft.fused_linear(%x, %w, activation="silu")

    Also where a norm went into the GEMM. The gate must be the first half. Numerics: the reference rounds the
    result of the GEMM before the activation, as eager does; a kernel may keep it in float32.
    """

    lacking = "the graph has no graft::swiglu"

    def rewrites(self) -> Sequence[Rewrite]:
        return REWRITES
