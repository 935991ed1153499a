"""A run on disk: the graph after every transform, and the report. What `graft dump` writes, read again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from graft.base.errors import DumpError, TransformOff, UnknownTransform
from graft.ir.io.serial import FORMAT
from graft.passes.dumps import MANIFEST, MARKER, REPORT, RUN_FORMAT, Manifest
from graft.passes.report import Report
from graft.workbench.stored import load_dump, load_state

STEM = re.compile(r"(\d{3})_([a-z]+)_(\w+)", re.ASCII)


@dataclass(frozen=True)
class StoredStep:
    """The graph after one transform; the first step is the graph as it was captured."""

    number: int
    stage: str
    transform: str
    stem: Path

    def graph(self, state: Mapping[str, torch.Tensor] | None = None) -> GraphModule:
        """`state` gives the weights; without it they are on the meta device, whatever is stored beside the dump."""
        return load_dump(self.stem, state or {})

    def text(self) -> str:
        return self.stem.with_suffix(".txt").read_text()


@dataclass(frozen=True)
class StoredRun:
    folder: Path
    report: Report
    steps: tuple[StoredStep, ...]
    manifest: Manifest

    def around(self, transform: str) -> tuple[StoredStep, StoredStep]:
        """The steps before and after a transform."""
        after = self.after(transform)
        return self.steps[self.steps.index(after) - 1], after

    def after(self, transform: str) -> StoredStep:
        """The step of a transform."""
        for step in self.steps[1:]:
            if step.transform == transform:
                return step
        if transform in self.report.transforms:
            raise TransformOff(transform, self.folder)
        raise UnknownTransform(transform, self.report.transforms, str(self.folder))

    def state(self) -> dict[str, torch.Tensor]:
        """The weights of all steps, where they were dumped too."""
        return load_state(self.folder)


def open_run(folder: str | Path) -> StoredRun:
    path = Path(folder)
    if not path.is_dir():
        raise DumpError(f"{path} is not a folder; graft dump MODEL -o DIR writes a folder of dumps")
    if not (path / MARKER).is_file():
        raise DumpError(f"{path} is no folder of dumps; graft dump MODEL -o DIR writes one")
    if not (path / MANIFEST).is_file() or not (path / REPORT).is_file():
        raise DumpError(
            f"{path} holds no whole run: it was interrupted, or an older graft wrote it; dump the model again"
        )
    manifest = read_manifest(path / MANIFEST)
    steps = tuple(read_step(path, stem) for stem in manifest.steps)
    try:
        report = Report.from_json((path / REPORT).read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path / REPORT, error) from error
    return StoredRun(path, report, steps, manifest)


def read_manifest(file: Path) -> Manifest:
    try:
        data: dict[str, Any] = json.loads(file.read_text())
        formats = data["format"], data["graphs"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(file, error) from error
    if formats != (RUN_FORMAT, FORMAT):
        raise DumpError(
            f"{file.parent} has format {formats[0]} with graphs of format {formats[1]}, this graft reads {RUN_FORMAT}"
            f" with {FORMAT}; it was written by graft {data.get('versions', {}).get('graft')}: dump the model again"
        )
    try:
        known: dict[str, Any] = {field.name: data[field.name] for field in fields(Manifest)}
        return Manifest(**(known | {"steps": tuple(known["steps"])}))
    except (KeyError, TypeError) as error:
        raise damaged(file, error) from error


def read_step(folder: Path, stem: str) -> StoredStep:
    found = STEM.fullmatch(stem)
    if found is None or not (folder / f"{stem}.json").is_file():
        raise DumpError(f"{folder} lacks {stem}.json, which its run wrote; dump the model again")
    return StoredStep(int(found[1]), found[2], found[3], folder / stem)


def damaged(file: Path, error: Exception) -> DumpError:
    return DumpError(f"{file} is damaged ({type(error).__name__}: {error}); dump the model again")
