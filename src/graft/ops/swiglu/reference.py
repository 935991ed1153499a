"""Gated activations in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
}


def swiglu(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up; both [..., d]."""
    return ACTIVATIONS[activation](gate) * up
