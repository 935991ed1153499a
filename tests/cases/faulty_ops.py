"""A gated activation as an op that is wrong in one way, by name: what a numeric check must find."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CALLS = {"count": 0}


@torch.library.custom_op("faulty::gated", mutates_args=())
def gated(gate: Tensor, up: Tensor, fault: str) -> Tensor:
    right = F.silu(gate) * up
    made = FAULTS[fault](right, gate, up)
    return made.clone() if made is right else made


@gated.register_fake
def _(gate: Tensor, up: Tensor, fault: str) -> Tensor:
    return torch.empty_like(gate * up)


def tokens(value: Tensor) -> int:
    return value.numel() // value.shape[-1]


def written(right: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    up.add_(1)
    return right


def counted(right: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    CALLS["count"] += 1
    return right * (1 + CALLS["count"] % 2)


def thousandth(right: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Below the rounding of each value, so it must come before that."""
    if gate.dtype is not torch.bfloat16:
        return right
    return (F.silu(gate.float()) * up.float() * 1.001).to(torch.bfloat16)


def scaled(right: Tensor, when: bool, factor: float = 1.05) -> Tensor:
    return right * factor if when else right


FAULTS = {
    "": lambda right, gate, up: right,
    "one token": lambda right, gate, up: scaled(right, tokens(gate) == 1),
    "above 521 tokens": lambda right, gate, up: scaled(right, tokens(gate) > 521),
    "above 64 tokens": lambda right, gate, up: scaled(right, tokens(gate) > 64),
    "at 37 tokens": lambda right, gate, up: scaled(right, tokens(gate) == 37),
    "two tokens of two sequences": lambda right, gate, up: scaled(right, gate.shape[:2] == (2, 2)),
    "in bfloat16": lambda right, gate, up: scaled(right, gate.dtype is torch.bfloat16),
    "in float16": lambda right, gate, up: scaled(right, gate.dtype is torch.float16),
    "in float32": lambda right, gate, up: scaled(right, gate.dtype is torch.float32, 1.001),
    "strided": lambda right, gate, up: scaled(right, not gate.is_contiguous()),
    "offset": lambda right, gate, up: scaled(right, gate.storage_offset() != 0),
    "between 5 and 20": lambda right, gate, up: torch.where((gate > 5) & (gate < 20), right * 1.05, right),
    "for negative values": lambda right, gate, up: torch.where(gate < -1, right * 1.05, right),
    "NaN swallowed": lambda right, gate, up: torch.where(right.isnan(), 0, right),
    "inf swallowed": lambda right, gate, up: torch.where(right.isinf(), 0, right),
    "a thousandth": lambda right, gate, up: right * 1.001,
    "a thousandth in bfloat16": thousandth,
    "writes its input": written,
    "every other call": counted,
    "by chance": lambda right, gate, up: right * (1 + 0.01 * torch.rand(())),
    "last row": lambda right, gate, up: torch.cat((right[:, :-1], right[:, -1:] * 1.05), 1),
}
