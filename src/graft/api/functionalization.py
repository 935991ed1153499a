"""fix_functionalization as a pass with a name: its record, its dumps, and its options for stock Inductor.

torch.compile(model, options=graft.fix_functionalization(dump_dir="dumps"))
graft.functionalization_reports()
$ graft diff dumps/graph_0 --transform fix_functionalization
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from torch.fx import Graph

from graft.backends import InductorSettings
from graft.base.errors import DumpError
from graft.ir.edit import second_module
from graft.memory.inductor_fix.report import FunctionalizationReport
from graft.passes.base import Context
from graft.passes.config import PipelineConfig, load_config
from graft.passes.dumps import DumpWriter
from graft.passes.library.fix_functionalization import NAME, record_of
from graft.passes.report import Report, TransformRecord

log = logging.getLogger("graft")
POST_GRAD = "post_grad"  # the step before the pass: Inductor's graph when its own patterns have run
LATER = "Inductor compiles at the first call; a graph from its caches has what was done when it was first compiled"
OFF = (
    f"{NAME} is off: calls that write are cloned for, and some of Inductor's own writes in place are wrong"
    " (docs/compile.md)"
)
_numbers = count()
_alone: list[FixRecorder] = []  # of graft.fix_functionalization, in order


class FixRecorder:
    """What the pass did to the graphs of one program. The pass finds it by its key; AOTInductor copies passes."""

    def __init__(self, folder: str | Path | None = None, config: PipelineConfig | None = None) -> None:
        self.key = f"graft {next(_numbers)}"
        self.folder = Path(folder) if folder is not None else None
        self.config = config
        self.fixed: list[FunctionalizationReport] = []
        self.records: list[TransformRecord] = []
        self.dumps, self.started, self.nodes = DumpWriter(), 0.0, 0
        from graft.memory.inductor_fix.functionalization import OBSERVERS  # Inductor, where it is used

        told = weakref.WeakMethod(self.told)  # nobody needs a record once its module is gone

        def observe(graph: Graph, report: FunctionalizationReport | None) -> None:
            if (still := told()) is not None:
                still(graph, report)

        OBSERVERS[self.key] = observe
        weakref.finalize(self, OBSERVERS.pop, self.key, None)

    def told(self, graph: Graph, report: FunctionalizationReport | None) -> None:
        """Before the pass without a report, after it with one."""
        if report is None:
            if self.folder is not None:
                self.dumps = DumpWriter.open(self.folder / f"graph_{len(self.records)}")
            self.write("capture", POST_GRAD, graph)
            self.started, self.nodes = time.perf_counter(), len(graph.nodes)
            return
        seconds = time.perf_counter() - self.started
        record = record_of([report], seconds=seconds, nodes_before=self.nodes, nodes_after=len(graph.nodes))
        self.fixed.append(report)
        self.records.append(record)
        self.write("inductor", NAME, graph)
        if self.dumps.folder is not None:
            name = f"graph_{len(self.records) - 1}"
            self.dumps.finish(Report(name, {NAME: record}), self.config or load_config(), Context())

    def write(self, stage: str, name: str, graph: Graph) -> None:
        if self.dumps.folder is None or graph.owning_module is None:
            return
        try:
            self.dumps.write(stage, name, second_module(graph.owning_module))
        except (
            DumpError
        ) as error:  # a graph of Inductor's may hold what graft's never do; it is compiled all the same
            log.warning("Inductor's graph is not dumped: %s", error)
            self.dumps = DumpWriter()

    @property
    def record(self) -> TransformRecord:
        """Of all graphs so far."""
        return joined_record([self])


def joined_record(recorders: Sequence[FixRecorder]) -> TransformRecord:
    """Of all graphs so far, of all variants of a module."""
    fixed = [report for recorder in recorders for report in recorder.fixed]
    records = [record for recorder in recorders for record in recorder.records]
    if not fixed:
        return TransformRecord(NAME, "inductor", "skipped", reason=LATER)
    seconds = sum(record.seconds for record in records)
    before, after = (sum(getattr(r, side) for r in records) for side in ("nodes_before", "nodes_after"))
    return record_of(fixed, seconds=seconds, nodes_before=before, nodes_after=after)


def fix_functionalization(
    options: Mapping[str, Any] | None = None, *, dump_dir: str | Path | None = None
) -> dict[str, Any]:
    """Options for torch.compile (or `inductor_configs` of AOTInductor): stock Inductor with this one pass of graft's.

    `options` are the caller's own for Inductor; custom passes among them run beside graft's. `dump_dir` gets a run
    for each graph (`graph_0`, …), which `graft diff` and `graft.open_run` read.
    """
    from graft.backends.inductor import inductor_patches

    recorder = FixRecorder(dump_dir)
    _alone.append(recorder)
    return inductor_patches(InductorSettings(options=options or {}, observer=recorder.key))


def functionalization_reports() -> list[Report]:
    """A report for each graph that `graft.fix_functionalization()` ran on in this process."""
    return [Report(f"graph_{index}", {NAME: record}) for r in _alone for index, record in enumerate(r.records)]
