"""Gated activations in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = {  # squared ReLU stands without a gate alone
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


def swiglu(gate: Tensor, up: Tensor, activation: str = "silu", upcast: bool = False) -> Tensor:
    """activation(gate) * up; both [..., d]. upcast: float32 inside, rounded after the product alone."""
    act = ACTIVATIONS[activation]
    if upcast:
        return (act(gate.to(torch.float32)) * up.to(torch.float32)).to(gate.dtype)
    return act(gate) * up
