"""Batches that decode: rows that go on, get a block, have one exchanged for an equal one, leave, or are padding."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.advance_rows.reference import LEAVE, NOTHING
from graft.ops.cases import Case


def make(
    rows: int,
    width: int,
    size: int,
    device: str,
    dtype: torch.dtype,  # noqa: ARG001
    generator: torch.Generator,
) -> tuple[Any, ...]:
    """The dtype is that of other ops' numbers; these are all whole."""

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    padding = rows * width  # the last block
    tokens, seq_lens = whole(-2, 50_000, rows), whole(size, width * size, rows)
    live, what = whole(0, 3, rows).clamp(max=1), whole(0, 4, rows)
    last = seq_lens // size  # of the entry that is written
    entries = torch.where(what == 0, LEAVE, torch.where(what == 1, last, torch.where(what == 2, last - 1, NOTHING)))
    block_tables = torch.randperm(rows * width, generator=generator).view(rows, width)
    block_tables[live == 0], seq_lens[live == 0], entries[live == 0] = padding, 1, NOTHING
    tensors = (tokens, seq_lens, live, entries, whole(0, padding, rows), block_tables)
    return (*(tensor.to(device) for tensor in tensors), padding, size)


CASES = [
    Case("one row", partial(make, 1, 8, 16), 1),
    Case("five rows", partial(make, 5, 300, 16), 1),
    Case("256 rows", partial(make, 256, 40, 16), 1),
    Case("block size 1", partial(make, 7, 20, 1), 1),
]
