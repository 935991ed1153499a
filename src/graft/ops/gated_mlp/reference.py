"""A gated MLP in plain torch: two of graft::fused_linear."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from graft.ops.fused_linear.reference import fused_linear


def gated_mlp(
    x: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor, activation: str,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, norm: Tensor | None = None, eps: float = 0.0,
    offset: float = 0.0, cast_last: bool = False, upcast: bool = False, residual: Tensor | None = None,
    normed: bool = False, fp8_from: int = 0,
) -> Tensor:  # fmt: skip
    """x: [..., k]; gate_up: [2 n, k], the gate first; down: [m, n]; both quantized, with a scale a row.

    Every argument is that of graft::fused_linear of this name, for one of the two layers or for both.
    """
    return two_layers(
        fused_linear, x, gate_up, gate_up_scale, down, down_scale, activation, gate_up_bias, down_bias, norm, eps,
        offset, cast_last, upcast, residual, normed, fp8_from,
    )  # fmt: skip


def two_layers(
    linear: Callable[..., Tensor], x: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor,
    down_scale: Tensor, activation: str, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    norm: Tensor | None = None, eps: float = 0.0, offset: float = 0.0, cast_last: bool = False, upcast: bool = False,
    residual: Tensor | None = None, normed: bool = False, fp8_from: int = 0,
) -> Tensor:  # fmt: skip
    """linear: graft::fused_linear, or its reference."""
    h = linear(
        x, gate_up, gate_up_bias, gate_up_scale, norm, eps, offset, cast_last, activation, upcast, None, normed,
        fp8_from,
    )  # fmt: skip
    return linear(h, down, down_bias, down_scale, residual=residual, fp8_from=fp8_from)
