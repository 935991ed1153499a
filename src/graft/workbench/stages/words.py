"""How stories say numbers, and what is equal but for its number once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from graft.stages.story_code import KernelRecord

FEW = 4
MOST = 12  # lines of one kind; the rest is in --json and in -o DIR


def cut(lines: Sequence[str], most: int = MOST) -> list[str]:
    return [*lines[:most], *([f"… {len(lines) - most} more"] if len(lines) > most else [])]


def folded(lines: Iterable[str]) -> list[str]:
    """Lines that differ in the numbers of names alone: once, with how often."""
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(re.sub(r"(?<=[A-Za-z])_\d+\b|(?<=layers\.)\d+", "", line), []).append(line)
    return [f"{same[0]}{f'  × {len(same)}' if len(same) > 1 else ''}" for same in groups.values()]


def plural(count: int, what: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def by_graph(lines: Iterable[str]) -> list[str]:
    """Lines that differ in the number of their graph alone: once, with how many graphs they hold for."""
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(re.sub(r"\b\d+/\d+\b", "", line), []).append(line)
    return [f"{same[0]}{f'  × {len(same)} graphs' if len(same) > 1 else ''}" for same in groups.values()]


def counts(counter: dict[str, int] | Counter[str]) -> str:
    return ", ".join(f"{name}{f' × {n}' if n > 1 else ''}" for name, n in Counter(counter).most_common(6))


def range_of(kernel: KernelRecord) -> tuple[float, float]:
    return (kernel.us_range[0], kernel.us_range[-1]) if kernel.us_range else (kernel.us, kernel.us)


def times_text(us: float, between: Sequence[float] = ()) -> str:
    """`3.2 µs`, with the range of its readings where they differ: `3.2 µs (2.9 to 4.1)`."""
    ends = [f"{one:.1f}" for one in between]
    return f"{us:.1f} µs" + (f" ({ends[0]} to {ends[-1]})" if len(set(ends)) > 1 else "")


def bytes_text(count: int | str) -> str:
    return f"{count:,} bytes" if isinstance(count, int) else f"{count} bytes"
