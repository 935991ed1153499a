"""How long each phase of a start took, as its progress names them."""

from __future__ import annotations

import time

from graft.base.files import Progress
from graft.base.progress import phase_of


class PhaseClock:
    """A progress that notes when each phase began, and hands the reports on."""

    def __init__(self, forward: Progress | None = None) -> None:
        self.forward = forward
        self.marks: list[tuple[str, float]] = []

    def __call__(self, what: str, done: int, total: int) -> None:
        self.mark(phase_of(what))
        if self.forward is not None:
            self.forward(what, done, total)

    def mark(self, phase: str) -> None:
        if not self.marks or self.marks[-1][0] != phase:
            self.marks.append((phase, time.perf_counter()))

    def phases(self) -> dict[str, float]:
        """Seconds of each phase until now, in the order in which they first came."""
        seconds: dict[str, float] = {}
        if not self.marks:
            return seconds
        ends = [began for _, began in self.marks[1:]] + [time.perf_counter()]
        for (phase, began), end in zip(self.marks, ends, strict=True):
            seconds[phase] = seconds.get(phase, 0.0) + end - began
        return seconds

    def since(self, *phases: str) -> float:
        """Seconds since one of the phases first began; 0 where none did."""
        began = next((began for name, began in self.marks if name in phases), None)
        return 0.0 if began is None else time.perf_counter() - began
