"""Graph dumps: `NNN_stage_transform.txt` for people, the same as JSON that loads back, and the report."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from torch.fx import GraphModule

from graft.errors import DumpError
from graft.graph.serial import graph_to_json
from graft.graph.text import graph_text
from graft.transforms.report import Report

MARKER = "graft-dump.txt"


@dataclass
class DumpWriter:
    """Writes one pair of files after each enabled transform. Without a folder it does nothing."""

    folder: Path | None = None
    count: int = field(default=0)

    @staticmethod
    def open(folder: str | Path | None) -> DumpWriter:
        """Takes `folder`, or GRAFT_DUMP_GRAPHS_DIR. Refuses a folder with files that graft did not write."""
        chosen = folder or os.environ.get("GRAFT_DUMP_GRAPHS_DIR")
        if not chosen:
            return DumpWriter()
        path = Path(chosen)
        try:
            path.mkdir(parents=True, exist_ok=True)
            existing = list(path.iterdir())
            if existing and not (path / MARKER).exists():
                raise DumpError(f"{path} is not empty and was not written by graft; choose another folder for dumps")
            for old in existing:
                if old.name == MARKER or (old.name[:3].isdigit() and old.suffix in (".txt", ".json")):
                    old.unlink()
            (path / MARKER).write_text("Graph dumps, written by graft. Files here are replaced by the next run.\n")
        except OSError as error:
            raise DumpError(f"cannot write dumps to {path}: {error}") from error
        return DumpWriter(path)

    def write(self, stage: str, name: str, gm: GraphModule) -> None:
        if self.folder is None:
            return
        stem = self.folder / f"{self.count:03d}_{stage}_{name}"
        try:
            stem.with_suffix(".txt").write_text(f"# stage: {stage}\n# transform: {name}\n{graph_text(gm.graph)}")
            stem.with_suffix(".json").write_text(graph_to_json(gm))
        except OSError as error:
            raise DumpError(f"cannot write {stem}: {error}") from error
        self.count += 1

    def finish(self, report: Report) -> None:
        if self.folder is None:
            return
        try:
            (self.folder / "report.json").write_text(report.to_json())
        except OSError as error:
            raise DumpError(f"cannot write the report to {self.folder}: {error}") from error
