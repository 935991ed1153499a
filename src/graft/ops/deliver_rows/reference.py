"""Tokens into one line of a ring, the lines in turn, in plain torch.

The ring may be memory of the host that a device writes by itself: then no copy stands between one step and the next.
"""

from __future__ import annotations

from torch import Tensor


def deliver_rows(tokens: Tensor, turn: Tensor, ring: Tensor) -> Tensor:
    """tokens: [B]; turn: [1], lines filled so far, written in place; ring: [lines, rows ≥ B] → [1], the line."""
    line = turn % ring.shape[0]
    ring[line.to(ring.device), : tokens.shape[0]] = tokens.to(ring.device)
    turn.add_(1)
    return line
