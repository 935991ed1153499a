"""The largest value of each row, in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def argmax_rows(logits: Tensor) -> Tensor:
    """logits: [n, vocab] → [n] int64: the first place of the largest value, or -1 where that is not finite."""
    largest, positions = logits.max(dim=-1)  # a NaN anywhere in the row is its largest
    return torch.where(largest.abs() < math.inf, positions, -1)
