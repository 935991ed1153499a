"""Everything that a report shows, collected from a run folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from inspect import getdoc
from pathlib import Path
from typing import Any

from graft.base.errors import GraftError
from graft.base.files import Progress
from graft.ir.facts import LayerPath, homes, read_graph
from graft.passes.dumps import MANIFEST
from graft.passes.registry import TransformRegistry, load_all
from graft.passes.report import TransformRecord
from graft.workbench.diff import GraphDiff, diff_graphs
from graft.workbench.diff_text import StyledLine, graph_lines, summary
from graft.workbench.discover.candidates import Discovery
from graft.workbench.discover.sources import discover_run
from graft.workbench.layers import fold
from graft.workbench.report.kernel_file import KernelFile, find_kernels
from graft.workbench.report.packing import StringTable
from graft.workbench.report.parts import pack_step
from graft.workbench.report.records import MatchRow, MissRow, match_rows, miss_rows
from graft.workbench.report.scenes import scenes
from graft.workbench.runs import StoredRun, StoredStep, open_run


@dataclass(frozen=True)
class TransformView:
    """One transform: its record, what it did to the graph (None where the graph is the same), and its own words."""

    record: TransformRecord
    doc: str
    matches: list[MatchRow]
    misses: list[MissRow]
    summary: str = ""
    lines: list[StyledLine] = field(default_factory=list)
    drawings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ran(self) -> bool:
        return bool(self.record.nodes_before)


@dataclass(frozen=True)
class ReportData:
    """`graphs` is for the browser: steps, drawings of changes by transform, and the texts they refer to."""

    run: StoredRun
    head: dict[str, str]
    counts: dict[str, int]
    transforms: list[TransformView]
    graphs: dict[str, Any]
    discovery: Discovery | None
    no_candidates: str  # why there is no discovery
    kernels: KernelFile | None


@dataclass(frozen=True)
class Graphs:
    """The steps that changed the graph, packed, and what each of them changed."""

    steps: list[dict[str, Any]]
    diffs: dict[str, GraphDiff]
    nodes: tuple[int, int]
    layers: int


def collect(folder: str | Path, kernels: Path | None = None, progress: Progress | None = None) -> ReportData:
    """kernels: what `graft bench --kernels --json` printed; without it, kernels.json in the folder, where there is
    one."""
    run = open_run(folder)
    times = find_kernels(run.folder, kernels)
    strings = StringTable()
    graphs = read_steps(run, strings, progress)
    if progress:
        progress("looking for candidates", 0, 1)
    discovery, why = candidates(run)
    if progress:
        progress("comparing layers", 0, 1)
    load_all()
    views = [view(record, graphs.diffs.get(name), strings) for name, record in run.report.transforms.items()]
    counts = {
        "layers": graphs.layers,
        "nodes captured": graphs.nodes[0],
        "nodes at the end": graphs.nodes[1],
        "transforms applied": sum(record.status == "applied" for record in run.report.transforms.values()),
        "matches": sum(len(record.matches) for record in run.report.transforms.values()),
        "near misses": sum(len(record.near_misses) for record in run.report.transforms.values()),
    }
    packed = {
        "strings": strings.table,
        "steps": graphs.steps,
        "diffs": {one.record.name: one.drawings for one in views if one.drawings},
    }
    return ReportData(run, head_of(run), counts, views, packed, discovery, why, times)


def read_steps(run: StoredRun, strings: StringTable, progress: Progress | None) -> Graphs:
    """Steps whose file is that of the step before them changed nothing and are not read."""
    packed: list[dict[str, Any]] = []
    diffs: dict[str, GraphDiff] = {}
    nodes: list[int] = []
    layers: set[LayerPath] = set()
    last = None
    for number, step in enumerate(changed_steps(run)):
        if progress:
            progress(f"reading {step.stem.name}", number, len(run.steps))
        gm = step.graph()
        if last is not None:
            diffs[step.transform] = diff_graphs(last.graph, gm.graph)
        items = read_graph(gm.graph)
        nodes.append(len(items))
        layers |= {layer for layer in homes(items) if layer is not None}
        packed.append({"name": step.transform, "stage": step.stage, **pack_step(items, strings)})
        last = gm
    return Graphs(packed, diffs, (nodes[0], nodes[-1]), len(layers))


def changed_steps(run: StoredRun) -> Iterator[StoredStep]:
    before = b""
    for step in run.steps:
        content = step.stem.with_suffix(".json").read_bytes()
        if content != before:
            yield step
        before = content


def view(record: TransformRecord, diff: GraphDiff | None, strings: StringTable) -> TransformView:
    doc = (getdoc(TransformRegistry.get(record.name)) or "") if record.name in TransformRegistry.names() else ""
    matches, misses = match_rows(record), miss_rows(record)
    if not diff:
        return TransformView(record, doc, matches, misses)
    drawings = scenes(diff, fold(diff), strings)
    return TransformView(record, doc, matches, misses, summary(diff), graph_lines(diff), drawings)


def candidates(run: StoredRun) -> tuple[Discovery | None, str]:
    """Of the last graph. A graph that cannot be weighed leaves the reason, not an empty section."""
    try:
        return discover_run(run.folder), ""
    except GraftError as error:
        return None, str(error)


def head_of(run: StoredRun) -> dict[str, str]:
    manifest = run.manifest
    written = datetime.fromtimestamp((run.folder / MANIFEST).stat().st_mtime, UTC)
    device = "meta (shapes only, no weights)" if manifest.device == "meta" else manifest.device
    return {
        "model": run.report.model or manifest.model or run.folder.name,
        "dtype": manifest.dtype,
        "device": device,
        "route": manifest.route,
        **manifest.versions,
        "run": f"{written:%Y-%m-%d %H:%M} UTC",
    }
