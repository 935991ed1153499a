"""fuse_gated_mlp: the two layers of a gated MLP become one op, where rows between them are rounded to float8."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from graft.ir.nodes import is_op, options_of, where
from graft.ir.patterns.match import Match, Refused
from graft.ir.patterns.words import choice, constant
from graft.passes.library.matvec.linears import FUSED, MatvecPatterns
from graft.passes.patterns import Rewrite
from graft.passes.registry import TransformRegistry

ops = torch.ops.graft


def mlp(
    x: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor,
    activation: Literal["silu", "gelu", "gelu_tanh"], eps: float, offset: float, cast_last: bool, upcast: bool,
    fp8_from: int, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, norm: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    first = partial(
        ops.fused_linear, x, constant(gate_up), gate_up_bias, constant(gate_up_scale), norm, eps, offset, cast_last,
        activation, upcast, None,
    )  # fmt: skip
    h = choice("divided", yes=lambda: first(True, fp8_from), no=lambda: first(False, fp8_from))
    return ops.fused_linear(
        h, constant(down), down_bias, constant(down_scale), None, 0.0, 0.0, False, "none", False, residual, False,
        fp8_from,
    )  # fmt: skip


def mlp_fused(
    x: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor, activation: str, eps: float,
    offset: float, cast_last: bool, upcast: bool, fp8_from: int, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, norm: Tensor | None, residual: Tensor | None, divided: str,
) -> Tensor:  # fmt: skip
    return ops.gated_mlp(
        x, gate_up, gate_up_scale, down, down_scale, activation, gate_up_bias, down_bias, norm, eps, offset,
        cast_last, upcast, residual, divided == "yes", fp8_from,
    )  # fmt: skip


def check_rounded(match: Match) -> None:
    first = next(node for node in match.nodes if is_op(node, FUSED))
    if not options_of(first)["fp8_from"]:
        raise Refused(first, f"rows that {where(first)} gives are not rounded to float8: as one op nothing is saved")


SHAPES = {
    "x": "b s k", "gate_up": "2*n k", "gate_up_scale": "2*n", "down": "m n", "down_scale": "m", "gate_up_bias": "2*n",
    "down_bias": "m", "norm": "k", "residual": "b s m",
}  # fmt: skip
REWRITES = (Rewrite(mlp, mlp_fused, SHAPES, check_rounded, needs=((FUSED, FUSED),), origin="down"),)


@TransformRegistry.register("fuse_gated_mlp")
class FuseGatedMlp(MatvecPatterns):
    """The two layers of a gated MLP become one op, where rows between them are rounded to float8.

    before:  %a = graft.fused_linear(%x, %w, None, %s, activation="silu", fp8_from=2)
             %y = graft.fused_linear(%a, %v, None, %t, residual=%r, fp8_from=2)
    after:   %y = graft.gated_mlp(%x, %w, %s, %v, %t, "silu", residual=%r, fp8_from=2)

    In steps of many tokens what the activation gives is then rounded in the kernel that computes it, and not written
    in 16 bits and read again; others run the two layers as before. Numerics: the same bits.
    """

    lacking = "no two layers of a gated MLP have rows between them that are rounded to float8"

    def rewrites(self) -> Sequence[Rewrite]:
        return REWRITES
