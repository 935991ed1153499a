"""The batch sizes and contexts that decode steps are recorded for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

LARGEST = 512  # rows; the kernels of a larger step take longer than launching them one by one


def bucket_sizes(max_num_seqs: int, asked: Sequence[int] | None = None) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, … and max_num_seqs (LARGEST where that is more), or those asked for; smallest first."""
    if asked is not None:
        return tuple(sorted(set(asked)))
    last = min(max_num_seqs, LARGEST)
    powers = [1 << i for i in range(last.bit_length())]
    return (*(size for size in powers if size < last), last)


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
