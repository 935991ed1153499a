"""A causal depthwise convolution over a sequence, operation for operation what Hugging Face's models compute."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

NONE, SILU = "none", "silu"


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = NONE) -> Tensor:
    """x: [b, c, s], weight: [c, k] → [b, c, s]; token t sees the tokens t - k + 1 … t, and zeros before the first."""
    padding = weight.shape[1] - 1
    out = F.conv1d(x.to(weight.dtype), weight[:, None], bias, padding=padding, groups=weight.shape[0])
    return activated(out[:, :, : x.shape[2]], activation).to(x.dtype)


def activated(x: Tensor, activation: str) -> Tensor:
    return F.silu(x) if activation == SILU else x
