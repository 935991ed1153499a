"""Tokens into one line of a ring, one after the other, in plain torch.

The ring may be memory of the host that a device writes by itself: then no copy stands between one step and the next.
"""

from __future__ import annotations

from torch import Tensor


def deliver_rows(tokens: Tensor, filled: Tensor, ring: Tensor) -> Tensor:
    """tokens: [B]; filled: [1], lines filled so far, written in place; ring: [lines, rows ≥ B] → [1], the line."""
    line = filled % ring.shape[0]
    ring[line.to(ring.device), : tokens.shape[0]] = tokens.to(ring.device)
    filled.add_(1)
    return line
