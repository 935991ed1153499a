"""A linear layer with what stands before and after it, in plain torch: norm, GEMM, bias, gated activation, sum."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.ops.layer_norm.reference import layer_norm
from graft.ops.rms_norm.reference import rms_norm
from graft.ops.swiglu.reference import ACTIVATIONS, swiglu
from graft.weights.packing import dequantize
from graft.weights.quantize import rows_to_fp8


def fused_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, norm: Tensor | None = None,
    eps: float = 0.0, offset: float = 0.0, cast_last: bool = False, activation: str = "none", upcast: bool = False,
    residual: Tensor | None = None, normed: bool = False, fp8_from: int = 0, glu: bool = True, alpha: float = 1.0,
    norm_bias: Tensor | None = None, center: bool = False,
) -> Tensor:  # fmt: skip
    """x: [..., k]; weight: [n, k], or quantized with a scale (see packing); bias: [n]; norm: [k], of graft::rms_norm.

    normed: without `norm`, x is divided by its root mean square all the same: the norm's weight is in `weight`.
    center: the norm is a LayerNorm, with norm_bias; without, an RMSNorm.
    activation: "none", or one of graft::swiglu: rows [:n/2] of the weight give the gate, the rest give up; without
    `glu` there is no gate, and it is of the result itself.
    residual: added last, [..., n] or [..., n/2], to `alpha` times the result.
    fp8_from: from so many tokens on, rows of what is multiplied are rounded to float8, each with a scale of its own;
    0: never.
    """
    if center:
        h = layer_norm(x, norm, norm_bias, eps)
    else:
        h = x if norm is None else rms_norm(x, norm, eps, offset, cast_last)
    if normed:
        h = rms_norm(x, x.new_ones(x.shape[-1]), eps)
    if scale is None:
        y = F.linear(h, weight, bias)
    else:  # the GEMM is in float32: quantized weights are no 16-bit numbers
        wide = torch.promote_types(h.dtype, torch.float32)
        full = dequantize(weight, scale, h.shape[-1], wide, activation != "none" and glu)
        h = fp8_rows(h) if rounds(h, fp8_from) else h
        y = F.linear(h.to(wide), full, None if bias is None else bias.to(wide)).to(x.dtype)
    if activation != "none" and glu:
        gate, up = y.chunk(2, dim=-1)
        y = swiglu(gate, up, activation, upcast)
    elif activation != "none":
        y = ACTIVATIONS[activation](y)
    if residual is None:
        return y
    return (y if alpha == 1 else y * alpha) + residual


def rounds(x: Tensor, fp8_from: int) -> bool:
    """Whether rows of x [..., k] are rounded to float8."""
    return 0 < fp8_from <= x.shape[:-1].numel()


def fp8_rows(h: Tensor) -> Tensor:
    """Every row as float8 numbers times a scale, the largest magnitude being 448; in float32 or wider."""
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    codes, scales = rows_to_fp8(wide)
    return codes.to(wide.dtype) * scales[..., None]
