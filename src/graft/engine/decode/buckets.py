"""The batch sizes and contexts that decode steps are captured for."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

# steps: a smaller size saves a tenth of a step that decodes; a prompt's, launching it
DECODE_PAYS, PROMPT_PAYS = 64, 4
# a larger step keeps the device busy for longer than the host needs to launch it, and tables for 100,000 rows would
# take gigabytes from the cache
MOST_ROWS = 4096
SHARES = 8  # sizes to each doubling, from 2 * SHARES rows on: a ninth of the rows is padding at most
# below, the weights' bytes take the time of a step, and padding costs nothing


def bucket_sizes(max_num_seqs: int, asked: Sequence[int] | None = None) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 18, 20, … max_num_seqs or MOST_ROWS, or those asked for; smallest first."""
    if asked is not None:
        return tuple(sorted(set(asked)))
    found, most = [], min(max_num_seqs, MOST_ROWS)
    for power in (1 << i for i in range(most.bit_length())):
        step = power // SHARES if power >= 2 * SHARES else power
        found += [size for size in range(power, 2 * power, step) if size < most]
    return (*found, most)


@dataclass
class BatchSizes:
    """The sizes of steps, of which powers of two and the largest are in use from the start.

    One between is taken into use when `pays` steps have wanted it: capturing a step takes as long as running ten to
    fifty of them, which a size that is met once, while a batch shrinks, never brings back.
    """

    every: tuple[int, ...]
    pays: int
    used: tuple[int, ...] = ()
    wanted: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        last = self.every[-1:]
        self.used = self.used or tuple(size for size in self.every if size & (size - 1) == 0 or size in last)

    def take(self, rows: int) -> int | None:
        """The size for a step of so many rows, or None."""
        size = self.peek(rows)
        best = bucket_for(rows, self.every)
        if best is not None and best not in self.used:
            self.wanted[best] += 1
            if size == best:
                self.used = tuple(sorted((*self.used, best)))
        return size

    def peek(self, rows: int) -> int | None:
        """What `take` would give, which counts."""
        best = bucket_for(rows, self.every)
        if best is not None and best not in self.used and self.wanted[best] + 1 >= self.pays:
            return best
        return bucket_for(rows, self.used)


def bucket_for(rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest size with room for so many rows, or None."""
    index = bisect_left(sizes, rows)
    return sizes[index] if index < len(sizes) else None


SHORT = 2048  # tokens: up to here sequences have attention kernels of their own, which split the context less
FEW = 128  # rows; with more of them those gain less than a hundredth of a step


def table_widths(rows: int, width: int, block_size: int) -> tuple[int, ...]:
    """Blocks of the tables that steps of so many rows are captured with, narrowest first; `width` is the widest."""
    short = SHORT // block_size
    return (short, width) if rows <= FEW and 0 < short < width else (width,)
