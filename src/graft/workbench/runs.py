"""A run on disk: the graph after every transform, and the report. What `graft dump` writes, read again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.fx import GraphModule

from graft.errors import DumpError, near
from graft.transforms.dumps import MARKER
from graft.transforms.report import Report
from graft.workbench.dump import load_dump

STEM = re.compile(r"(\d{3})_([a-z]+)_(\w+)", re.ASCII)


@dataclass(frozen=True)
class Step:
    """The graph after one transform; the first step is the graph as it was captured."""

    number: int
    stage: str
    transform: str
    stem: Path

    def graph(self, state: dict[str, torch.Tensor] | None = None) -> GraphModule:
        """`state` gives the weights; without it they are on the meta device."""
        return load_dump(self.stem, state)

    def text(self) -> str:
        return self.stem.with_suffix(".txt").read_text()


@dataclass(frozen=True)
class Run:
    folder: Path
    report: Report
    steps: tuple[Step, ...]

    def around(self, transform: str) -> tuple[Step, Step]:
        """The steps before and after a transform."""
        names = [step.transform for step in self.steps]
        if transform not in names[1:]:
            raise DumpError(f"{self.folder} has no graph after {transform!r}{near(transform, names[1:])}")
        place = names.index(transform, 1)
        return self.steps[place - 1], self.steps[place]


def open_run(folder: str | Path) -> Run:
    path = Path(folder)
    if not (path / MARKER).is_file():
        raise DumpError(f"{path} is no folder of dumps; graft dump MODEL -o DIR writes one")
    found = ((STEM.fullmatch(file.stem), file) for file in sorted(path.glob("*.json")))
    steps = [Step(int(m[1]), m[2], m[3], file.with_suffix("")) for m, file in found if m]
    if not steps or not (path / "report.json").is_file():
        raise DumpError(f"{path} holds no whole run, it was interrupted; dump the model again")
    return Run(path, Report.from_json((path / "report.json").read_text()), tuple(steps))
