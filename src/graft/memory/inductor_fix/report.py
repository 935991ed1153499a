"""What the functionalization fix did to one graph, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KeptCopy:
    """A copy that the graph needs: without it `node` would read or return something else."""

    node: str  # the mutating call
    op: str
    value: str  # what is copied
    reason: str


@dataclass(frozen=True)
class MovedRead:
    """A read of the old value that now stands above the write."""

    reader: str
    above: str


@dataclass(frozen=True)
class FunctionalizationReport:
    """Names are those of the graph that the pass was given."""

    restored: tuple[str, ...] = ()  # functional calls that are mutating calls again
    kept: tuple[KeptCopy, ...] = ()
    protected: tuple[KeptCopy, ...] = ()  # returned values that are copied, because their memory is written later
    moved: tuple[MovedRead, ...] = ()
    left: tuple[tuple[str, str], ...] = ()  # calls left to Inductor, with the reason

    def lines(self) -> list[str]:
        """One for each thing done."""
        lines = [f"%{name}: writes in place" for name in self.restored]
        lines += [f"%{move.reader}: moved above %{move.above}, which overwrites what it reads" for move in self.moved]
        lines += [f"%{c.node} ({c.op}): copies %{c.value}: {c.reason}" for c in self.kept]
        lines += [f"%{c.value}: returned as a copy: {c.reason}" for c in self.protected]
        lines += [f"%{name}: left to Inductor: {reason}" for name, reason in self.left]
        return lines

    def text(self) -> str:
        return "\n".join(self.lines()) or "nothing writes in place"
