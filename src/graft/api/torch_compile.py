"""torch.compile(model, backend="graft"): the pipeline on Dynamo's graphs, then Inductor.

    compiled = torch.compile(model, backend="graft")            # reports: graft.backend_reports()
    backend = graft.Backend({"transforms": {"fuse_rope": {"enabled": False}}})
    compiled = torch.compile(model, backend=backend)            # reports: backend.reports

Dynamo calls a backend once for each graph it captures; a graph break gives two graphs, and two reports.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from torch.fx import GraphModule

from graft.api.functionalization import OFF, FixRecorder
from graft.api.saved_function import loaded_reports, refuse_eager, to_be_saved
from graft.backends import InductorSettings
from graft.backends.dynamo import hand_back, refuse_modes, trace_dynamo, unlike_eager_by_name
from graft.backends.eager import lower_eager
from graft.backends.float_inputs import Constants
from graft.backends.inductor import (
    INDUCTOR_NOTE,
    apart_from_dynamo,
    compile_with_inductor,
    refuse_named_kernels,
    unlike_eager,
)
from graft.backends.inductor_caches import watched_lookups
from graft.base.errors import GraftError, GraphRefused, UsageError
from graft.memory.uninitialised import uninitialised_notes
from graft.passes.base import Context
from graft.passes.config import PipelineConfig, load_config
from graft.passes.library.fix_functionalization import NAME as FIX
from graft.passes.pipeline import run_pipeline
from graft.passes.report import Report, TransformRecord

Compiled = Callable[..., Any]


class Backend:
    """A backend for torch.compile with a configuration of its own. `reports` has one report a compiled graph.

    inductor: compile the transformed graph with Inductor; False runs it as it is, with graft's kernels bound.
    on_error: what a failure of graft does to a graph. "raise" (the default) stops the compilation with the reason;
    "skip" compiles the graph with stock Inductor, with a warning and a note in its report. A graph that graft cannot
    take (gradients, autocast, higher-order ops…) always goes to stock Inductor that way.
    """

    __name__ = "graft"  # torch.compile asks callables for it

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | PipelineConfig | None = None,
        inductor: bool = True,
        *,
        on_error: Literal["raise", "skip"] = "raise",
        dump_dir: str | Path | None = None,
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise UsageError(f"on_error must be 'raise' or 'skip', but is {on_error!r}")
        self.config = config if isinstance(config, PipelineConfig) else load_config(config)
        if inductor:
            refuse_named_kernels(self.config.kernels)
        self.inductor = inductor
        self.on_error = on_error
        self.dump_dir = dump_dir
        self.reports: list[Report] = []
        self._warned: set[str] = set()
        self._constants = Constants()

    def __call__(
        self,
        gm: GraphModule,
        inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Compiled:
        """Called by Dynamo. `mode` and `options` of torch.compile go to Inductor."""
        if not self.inductor:
            refuse_eager()
        if not self.inductor and (mode or options):
            raise UsageError("mode and options of torch.compile are Inductor's; Backend(inductor=False) takes none")
        compiled = self.compile(gm, inputs, InductorSettings(mode, options or {}))
        self._constants.settle()
        return compiled

    def compile(self, gm: GraphModule, inputs: Sequence[Any], asked: InductorSettings) -> Compiled:
        name = f"graph_{len(self.reports)}"
        try:
            transformed, report = self.transform(gm, inputs, name)
            lowered = None if self.inductor else lower_eager(transformed, self.config.kernels)
        except GraphRefused as refusal:
            return self.fall_back(gm, inputs, asked, name, str(refusal))
        except GraftError as error:
            if self.on_error == "raise":
                raise
            return self.fall_back(gm, inputs, asked, name, f"{type(error).__name__}: {error}")
        if lowered is not None:
            notes = (*report.notes, *lowered.notes, *uninitialised_notes(transformed))
            self.reports.append(replace(report, kernels=lowered.kernels, notes=notes))
            return lowered.call
        compiled, notes, record = self.with_notes(hand_back(gm, transformed), inputs, asked, name)
        records = {**report.transforms, FIX: record}
        notes = (INDUCTOR_NOTE, *unlike_eager(transformed.graph), *uninitialised_notes(transformed), *notes)
        report = replace(report, transforms=records, notes=(*report.notes, *notes))
        return self.finished(compiled, gm, report)

    def finished(self, compiled: Compiled, gm: GraphModule, report: Report) -> Compiled:
        compiled, report = to_be_saved(compiled, gm.graph, report)
        self.reports.append(report)
        return compiled

    def transform(self, gm: GraphModule, inputs: Sequence[Any], name: str) -> tuple[GraphModule, Report]:
        refuse_modes(gm.graph, inputs)
        self._constants.ask_for(gm)
        transformed = trace_dynamo(gm, inputs)
        context, folder = Context(route="module"), self.dump_folder(name)
        with apart_from_dynamo():
            report = run_pipeline(transformed, self.config, context, model=name, dump_dir=folder)
        return transformed, report

    def dump_folder(self, name: str) -> Path | None:
        base = self.dump_dir or os.environ.get("GRAFT_DUMP_GRAPHS_DIR")
        return Path(base) / name if base else None

    def fall_back(
        self, gm: GraphModule, inputs: Sequence[Any], asked: InductorSettings, name: str, reason: str
    ) -> Compiled:
        """The graph as Dynamo gave it. Each reason is a warning once, and a note in every report."""
        instead = "Inductor compiles it as it is" if self.inductor else "it runs as Dynamo captured it"
        note = f"no transform ran on this graph, {instead}: {reason}"
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"graft: {name}: {note}", stacklevel=2)
        if not self.inductor:
            self.reports.append(Report(name, notes=(note,)))
            return gm.forward
        compiled, notes, record = self.with_notes(gm, inputs, asked, name)
        report = Report(name, {FIX: record}, notes=(note, *unlike_eager_by_name(gm.graph), *notes))
        return self.finished(compiled, gm, report)

    def with_notes(
        self, gm: GraphModule, inputs: Sequence[Any], asked: InductorSettings, name: str
    ) -> tuple[Compiled, tuple[str, ...], TransformRecord]:
        """The compiled graph, and what was written in place in it, or that a cache holds that knowledge."""
        if not self.config.transforms[FIX].enabled:
            with watched_lookups() as lookups:
                compiled = compile_with_inductor(gm, inputs, replace(asked, fix=False))
            return compiled, (OFF, *filter(None, [lookups.note()])), TransformRecord(FIX, "inductor", "disabled")
        folder = self.dump_folder(name)
        recorder = FixRecorder(folder / "inductor" if folder else None, self.config)
        with watched_lookups() as lookups:
            compiled = compile_with_inductor(gm, inputs, replace(asked, observer=recorder.key))
        lines = [line for fixed in recorder.fixed for line in fixed.lines()]
        lines += [lookups.note()] if lookups.note() else []
        if lookups.counts["hit"]:
            lines.append(
                "it came from Inductor's cache; what is written in place in it was told when it was first compiled"
            )
        return compiled, tuple(lines), recorder.record


@cache
def default_backend() -> Backend:
    return Backend()


def graft_backend(gm: GraphModule, inputs: Sequence[Any], **settings: Any) -> Compiled:
    """What the name "graft" stands for (entry point group `torch_dynamo_backends`)."""
    return default_backend()(gm, inputs, **settings)


def backend_reports() -> list[Report]:
    """The reports of every graph that torch.compile(…, backend="graft") has compiled in this process, in order; those
    of functions that were loaded come first."""
    return [*loaded_reports, *default_backend().reports]
