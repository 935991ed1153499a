"""The batch sizes that decode steps are recorded for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def bucket_sizes(max_num_seqs: int, asked: Sequence[int] | None = None) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, … and max_num_seqs, or those asked for; smallest first."""
    if asked is not None:
        return tuple(sorted(set(asked)))
    powers = [1 << i for i in range(max_num_seqs.bit_length())]
    return (*(size for size in powers if size < max_num_seqs), max_num_seqs)


def bucket_for(rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest size with room for so many rows, or None."""
    index = bisect_left(sizes, rows)
    return sizes[index] if index < len(sizes) else None
