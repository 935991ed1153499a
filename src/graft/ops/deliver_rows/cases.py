"""Batches of tokens for rings of two lines, the first or the second of which is due."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case


def make(
    rows: int,
    room: int,
    filled: int,
    device: str,
    dtype: torch.dtype,  # noqa: ARG001
    generator: torch.Generator,
) -> tuple[Any, ...]:
    """The dtype is that of other ops' numbers; these are all whole."""
    tokens = torch.randint(-2, 50_000, (rows,), generator=generator)
    ring = torch.randint(0, 9, (2, room), generator=generator)
    return tokens.to(device), torch.tensor([filled]).to(device), ring.to(device)


CASES = [
    Case("one row", partial(make, 1, 1, 0), 1),
    Case("five of eight rows, second line", partial(make, 5, 8, 3), 1),
    Case("256 rows", partial(make, 256, 256, 1 << 40), 1),
]
