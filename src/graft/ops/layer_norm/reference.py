"""LayerNorm in plain torch, operation for operation as models spell it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# fused: torch.layer_norm, which computes in float32 and rounds once. The others are spelled out by the model: the
# variance as the mean of squares or by `var`, then a product with rsqrt or a division by sqrt.
FORMS = ("fused", "mean_rsqrt", "mean_sqrt", "var_rsqrt", "var_sqrt")


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, form: str = "fused", upcast: bool = False
) -> Tensor:
    """x: [..., d], weight and bias: [d]. upcast: a spelled-out form is float32 inside and rounded at the end;
    without it every step rounds to x's dtype."""
    if form == "fused":
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
    wide = torch.float32 if upcast else x.dtype
    h = normalize(x.to(wide), eps, form)
    if weight is not None:
        h = weight.to(wide) * h
    if bias is not None:
        h = h + bias.to(wide)
    return h.to(x.dtype)


def normalize(h: Tensor, eps: float, form: str) -> Tensor:
    spread, _, root = form.partition("_")
    centred = h - h.mean(-1, keepdim=True)
    squares = centred.pow(2).mean(-1, keepdim=True) if spread == "mean" else h.var(-1, unbiased=False, keepdim=True)
    return centred * torch.rsqrt(squares + eps) if root == "rsqrt" else centred / torch.sqrt(squares + eps)
