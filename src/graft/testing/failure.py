"""How every helper of the kit fails: expected, found, the near misses, what to do."""

from __future__ import annotations

from collections.abc import Sequence

from graft.ir.patterns.match import NearMiss
from graft.passes.report import TransformRecord

MOST_LINES = 60  # of a graph; a whole model would bury the message


def failure(expected: str, found: str, details: Sequence[str] = (), *, advice: str) -> AssertionError:
    """Four lines that say it all, then the rest of `details`, such as the graph."""
    shown = [f"  {line}" for line in details]
    lines = [f"expected: {expected}", f"found:    {found}", *shown[:1], f"what to do: {advice}", *shown[1:]]
    return AssertionError("\n".join(lines))


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def match_lines(record: TransformRecord) -> list[str]:
    return [
        f"matched {m.anchor}{f' as {m.pattern}' if m.pattern else ''}: {', '.join(m.replaced)} → {', '.join(m.made)}"
        for m in record.matches
    ]


def miss_lines(misses: Sequence[NearMiss]) -> list[str]:
    """The nearest first."""
    ordered = sorted(misses, key=lambda miss: miss.matched / max(miss.size, 1), reverse=True)
    lines = [
        f"near miss at {m.anchor}: {m.reason} ({m.matched} of {m.size} calls of {m.pattern} fitted)" for m in ordered
    ]
    return lines or ["no near misses"]


def graph_lines(text: str) -> list[str]:
    lines = text.rstrip().splitlines()
    cut = [f"… {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
    return ["the graph:", *(f"  {line}" for line in lines[:MOST_LINES]), *cut]
