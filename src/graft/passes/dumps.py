"""Graph dumps: `NNN_stage_transform.txt` for people, the same as JSON that loads back, the report, and a manifest.

The manifest `run.json` is written last: a folder without it holds no whole run.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from graft import __version__
from graft.base.errors import DumpError
from graft.ir.folding import folded_text
from graft.ir.io.serial import FORMAT, graph_to_json
from graft.ir.io.text import graph_text
from graft.ir.verify import module_state
from graft.passes.base import Context
from graft.passes.config import PipelineConfig
from graft.passes.report import Report

MARKER = "graft-dump.txt"
MANIFEST, REPORT, WEIGHTS = "run.json", "report.json", "weights.safetensors"
OUTPUTS = "outputs.safetensors"  # what `graft check --save-baseline` computed with the graphs
RUN_FORMAT = 3  # 2: inputs of decoders as ops/layout.py names them; 3: numeric checks under their name


@dataclass(frozen=True)
class Manifest:
    """What a run was made of and with. `format`: of the folder; `graphs`: of the graphs in it."""

    model: str
    dtype: str
    device: str
    route: str
    steps: tuple[str, ...]
    config: dict[str, Any]
    versions: dict[str, str]
    format: int = RUN_FORMAT
    graphs: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, default=str)


@dataclass
class DumpWriter:
    """Writes one pair of files after each enabled transform. Without a folder it does nothing."""

    folder: Path | None = None
    steps: list[str] = field(default_factory=list)
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)  # dtype and device of what floats in the model
    fold: bool = False  # whether the text shows equal layers once
    state: dict[str, torch.Tensor] | None = None  # where it is to be kept: all that any step refers to

    @staticmethod
    def open(folder: str | Path | DumpWriter | None) -> DumpWriter:
        """Takes `folder`, or GRAFT_DUMP_GRAPHS_DIR. Refuses a folder with files that graft did not write."""
        if isinstance(folder, DumpWriter):
            return folder
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
                if old.name in (MARKER, MANIFEST, REPORT, WEIGHTS, OUTPUTS) or (
                    old.name[:3].isdigit() and old.suffix in (".txt", ".json")
                ):
                    old.unlink()
            (path / MARKER).write_text("Graph dumps, written by graft. Files here are replaced by the next run.\n")
        except OSError as error:
            raise DumpError(f"cannot write dumps to {path}: {error}") from error
        return DumpWriter(path)

    def write(self, stage: str, name: str, gm: GraphModule) -> None:
        if self.folder is None:
            return
        stem = self.folder / f"{len(self.steps):03d}_{stage}_{name}"
        text = folded_text(gm.graph) if self.fold else graph_text(gm.graph)
        try:
            stem.with_suffix(".txt").write_text(f"# stage: {stage}\n# transform: {name}\n{text}")
            stem.with_suffix(".json").write_text(graph_to_json(gm))
        except OSError as error:
            raise DumpError(f"cannot write {stem}: {error}") from error
        state = module_state(gm)
        if not self.steps:
            floats = (t for t in state.values() if t.is_floating_point())
            self.kinds.update((str(t.dtype).removeprefix("torch."), str(t.device)) for t in floats)
        self.steps.append(stem.name)
        if self.state is not None:
            self.keep(state, stem.name)

    def keep(self, state: dict[str, torch.Tensor], step: str) -> None:
        assert self.state is not None
        for name, tensor in state.items():
            if self.state.setdefault(name, tensor) is not tensor:
                raise DumpError(f"{name} is another tensor after {step} than before; such weights cannot be dumped")

    def finish(self, report: Report, config: PipelineConfig, context: Context) -> None:
        if self.folder is None:
            return
        dtype, device = self.kinds.most_common(1)[0][0] if self.kinds else ("none", "none")
        steps = tuple(self.steps)
        manifest = Manifest(report.model, dtype, device, context.route, steps, config_values(config), versions())
        try:
            (self.folder / REPORT).write_text(report.to_json())
            (self.folder / MANIFEST).write_text(manifest.to_json())
        except OSError as error:
            raise DumpError(f"cannot write the report to {self.folder}: {error}") from error


def config_values(config: PipelineConfig) -> dict[str, Any]:
    """The resolved configuration by dotted key, as `graft config` shows it."""
    values: dict[str, Any] = {"verify": config.verify}
    values |= {f"kernels.{op}": kernel for op, kernel in config.kernels.items()}
    for name, settings in config.transforms.items():
        values |= {f"transforms.{name}.{key}": value for key, value in asdict(settings).items()}
    return values


def versions() -> dict[str, str]:
    """Of graft and what it captured with."""
    try:
        transformers = version("transformers")
    except PackageNotFoundError:
        transformers = "none"
    return {"graft": __version__, "torch": str(torch.__version__), "transformers": transformers}
