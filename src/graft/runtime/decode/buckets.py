"""The batch sizes and contexts that decode steps are recorded for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

SHARES = 8  # sizes to each doubling, from 2 * SHARES rows on: a ninth of the rows is padding at most
# below, the weights' bytes take the time of a step, and padding costs nothing


def bucket_sizes(max_num_seqs: int, asked: Sequence[int] | None = None) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 18, 20, … max_num_seqs, or those asked for; smallest first."""
    if asked is not None:
        return tuple(sorted(set(asked)))
    found = []
    for power in (1 << i for i in range(max_num_seqs.bit_length())):
        step = power // SHARES if power >= 2 * SHARES else power
        found += [size for size in range(power, 2 * power, step) if size < max_num_seqs]
    return (*found, max_num_seqs)


def first_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Those that are captured when the engine is built: powers of two and the largest. A start is not to wait for
    the others, which are captured when they are first needed."""
    return tuple(size for size in sizes if size & (size - 1) == 0 or size == sizes[-1])


def bucket_for(rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest size with room for so many rows, or None."""
    index = bisect_left(sizes, rows)
    return sizes[index] if index < len(sizes) else None


SHORT = 2048  # tokens: up to here few sequences have an attention kernel of their own, which splits the context less
FEW = 8  # rows; with more of them the device is full whatever the context is


def table_widths(rows: int, width: int, block_size: int) -> tuple[int, ...]:
    """Blocks of the tables that steps of so many rows are recorded with, narrowest first; `width` is the widest."""
    short = SHORT // block_size
    return (short, width) if rows <= FEW and 0 < short < width else (width,)
