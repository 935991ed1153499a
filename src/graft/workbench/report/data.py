"""Everything that a report shows, collected from a run folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from inspect import getdoc
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from graft.base.errors import GraftError
from graft.base.files import Progress
from graft.ir.facts import Item, homes, read_graph
from graft.passes.dumps import MANIFEST
from graft.passes.registry import TransformRegistry, load_all
from graft.passes.report import TransformRecord
from graft.workbench.diff import GraphDiff, diff_graphs
from graft.workbench.diff_text import StyledLine, graph_lines, summary
from graft.workbench.discover.candidates import Discovery
from graft.workbench.discover.sources import discover_run
from graft.workbench.layers import fold
from graft.workbench.report.code import generated, op_kernels
from graft.workbench.report.headline import Headline, headline
from graft.workbench.report.kernel_file import KernelFile, find_kernels
from graft.workbench.report.merged import add_merged
from graft.workbench.report.packing import StringTable
from graft.workbench.report.parts import pack_step
from graft.workbench.report.records import MatchRow, MissRow, match_rows, miss_rows
from graft.workbench.report.scenes import scenes
from graft.workbench.report.sides import SideRow, side_rows
from graft.workbench.report.sizes import SizeNames, size_names
from graft.workbench.report.sources import SourceLines
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
    sides: list[list[SideRow]] = field(default_factory=list)  # before and after, a list for each drawing

    @property
    def ran(self) -> bool:
        return bool(self.record.nodes_before)


@dataclass(frozen=True)
class ReportData:
    """`graphs` is for the browser: steps, drawings of changes by transform, and the texts they refer to; `code` too:
    the model's Python, generated C++, kernels of ops."""

    run: StoredRun
    head: dict[str, str]
    headline: Headline
    counts: dict[str, int]
    transforms: list[TransformView]
    graphs: dict[str, Any]
    code: dict[str, Any]
    sizes: SizeNames
    discovery: Discovery | None
    no_candidates: str  # why there is no discovery
    kernels: KernelFile | None


@dataclass(frozen=True)
class Graphs:
    """The steps that changed the graph, packed, and what each of them changed; the first and the last graph."""

    steps: list[dict[str, Any]]
    diffs: dict[str, GraphDiff]
    nodes: tuple[int, int]
    layers: int
    ends: tuple[GraphModule, GraphModule]
    sizes: SizeNames
    merged: dict[str, tuple[str, ...]]
    lines: SourceLines
    ops: set[str]


def collect(
    folder: str | Path, kernels: Path | None = None, progress: Progress | None = None, code: Path | None = None
) -> ReportData:
    """kernels: what `graft bench --kernels --json` printed; without it, kernels.json in the folder, where there is
    one. code: what Inductor generated for the last graph; without it, inductor.py in the folder."""
    run = open_run(folder)
    times = find_kernels(run.folder, kernels)
    written = generated(run.folder, code)
    strings = StringTable()
    graphs = read_steps(run, strings, progress)
    if progress:
        progress("looking for candidates", 0, 1)
    discovery, why = candidates(run)
    if progress:
        progress("comparing layers", 0, 1)
    load_all()
    records = run.report.transforms.values()
    views = [view(record, graphs.diffs.get(record.name), strings, graphs) for record in records]
    counts = {
        "layers": graphs.layers,
        "nodes captured": graphs.nodes[0],
        "nodes at the end": graphs.nodes[1],
        "transforms applied": sum(record.status == "applied" for record in records),
        "matches": sum(len(record.matches) for record in records),
        "near misses": sum(len(record.near_misses) for record in records),
    }
    packed = {
        "strings": strings.table,
        "steps": graphs.steps,
        "diffs": {one.record.name: one.drawings for one in views if one.drawings},
        "sizes": graphs.sizes.meanings,
    }
    beside = {"sources": graphs.lines.pack(), "generated": written, "ops": op_kernels(graphs.ops)}
    first = headline(*graphs.ends, records, times)
    return ReportData(run, head_of(run), first, counts, views, packed, beside, graphs.sizes, discovery, why, times)


def read_steps(run: StoredRun, strings: StringTable, progress: Progress | None) -> Graphs:
    """Steps whose file is that of the step before them changed nothing and are not read."""
    steps = list(changed_steps(run))
    modules: list[GraphModule] = []
    read: list[list[Item]] = []
    diffs: dict[str, GraphDiff] = {}
    merged: dict[str, tuple[str, ...]] = {}
    lines = SourceLines()
    for number, step in enumerate(steps):
        if progress:
            progress(f"reading {step.stem.name}", number, len(steps))
        gm = step.graph()
        items = read_graph(gm.graph)
        lines.read(gm.graph)
        if modules:
            diffs[step.transform] = diff_graphs(modules[-1].graph, gm.graph)
            if step.transform in run.report.transforms:
                add_merged(merged, run.report.transforms[step.transform], read[-1], items)
        modules = [*modules[:1], gm]  # the first and the one before
        read.append(items)
    sizes = size_names(read)
    layers = {layer for items in read for layer in homes(items) if layer is not None}
    ops = {item.op for items in read for item in items}
    packed = [
        {"name": step.transform, "stage": step.stage, **pack_step(sizes.items(items), strings, merged)}
        for step, items in zip(steps, read, strict=True)
    ]
    nodes, ends = (len(read[0]), len(read[-1])), (modules[0], modules[-1])
    return Graphs(packed, diffs, nodes, len(layers), ends, sizes, merged, lines, ops)


def changed_steps(run: StoredRun) -> Iterator[StoredStep]:
    before = b""
    for step in run.steps:
        content = step.stem.with_suffix(".json").read_bytes()
        if content != before:
            yield step
        before = content


def view(record: TransformRecord, diff: GraphDiff | None, strings: StringTable, graphs: Graphs) -> TransformView:
    doc = (getdoc(TransformRegistry.get(record.name)) or "") if record.name in TransformRegistry.names() else ""
    matches, misses = match_rows(record), miss_rows(record)
    if not diff:
        return TransformView(record, doc, matches, misses)
    folded, sizes = fold(diff), graphs.sizes
    drawings = scenes(diff, folded, strings, sizes, graphs.merged)
    lines = [replace(line, text=sizes.text(line.text)) for line in graph_lines(diff)]
    return TransformView(record, doc, matches, misses, summary(diff), lines, drawings, side_rows(diff, folded, sizes))


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
