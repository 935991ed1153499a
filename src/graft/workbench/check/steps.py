"""The graphs of a run, each read once: several checks look at the same step."""

from __future__ import annotations

from torch.fx import GraphModule

from graft.workbench.discover.values import restore_values
from graft.workbench.runs import StoredRun, StoredStep


class StepGraphs:
    """Graphs without weights, with the values that their text describes."""

    def __init__(self, run: StoredRun) -> None:
        self.run = run
        self.known: dict[int, GraphModule] = {}

    def at(self, step: StoredStep) -> GraphModule:
        if step.number not in self.known:
            gm = step.graph()
            restore_values(gm)
            self.known[step.number] = gm
        return self.known[step.number]

    def around(self, transform: str) -> tuple[GraphModule, GraphModule]:
        before, after = self.run.around(transform)
        return self.at(before), self.at(after)

    def readable(self, transform: str) -> bool:
        """Whether both graphs were read; of one that cannot be, `around` says why."""
        return {step.number for step in self.run.around(transform)} <= self.known.keys()
