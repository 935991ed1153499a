"""Compiled modules as folders: what CompiledModule.save and graft.load do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from graft.artifact import Artifact, read_artifact, write_artifact
from graft.backends import lower
from graft.graph.pytrees import keyword_names
from graft.runtime.compile import CompiledModule, Inputs
from graft.transforms.report import Report


def save_compiled(compiled: CompiledModule, path: str | Path, *, overwrite: bool = False) -> None:
    """State is saved as it is now, together with the initial values that reset brings back."""
    artifact = Artifact(
        compiled.graph_module,
        compiled.backend,
        compiled.kernels,
        tuple(compiled.aliases),
        compiled.report.to_json(),
        initial=compiled.initial,
    )
    write_artifact(path, artifact, overwrite=overwrite)


def load_compiled(path: str | Path) -> CompiledModule:
    """The module of `compiled.save(path)`, going on from the state at that time, with the same report and aliases."""
    artifact = read_artifact(path)
    gm = artifact.graph_module
    lowered = lower(gm, artifact.backend, artifact.kernels)
    report = Report.from_json(artifact.report)
    notes = [*artifact.notes, *lowered.notes]
    changed = {op: kernel for op, kernel in lowered.kernels.items() if report.kernels.get(op, kernel) != kernel}
    notes += [f"{op} was saved running {report.kernels[op]}; here it runs {kernel}" for op, kernel in changed.items()]
    added = tuple(note for note in notes if note not in report.notes)
    report = replace(report, kernels={**report.kernels, **lowered.kernels}, notes=(*report.notes, *added))
    values = tuple(node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder")
    inputs = Inputs(values, keyword_names(gm.graph))
    return CompiledModule(
        gm, lowered.call, report, lowered.backend, inputs, artifact.aliases, artifact.kernels, artifact.initial
    )


load = load_compiled  # graft.load
