"""Compiled modules as folders: what CompiledModule.save and graft.load do."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path

from graft.api.artifact import Artifact, SavedGraph, read_artifact, write_artifact
from graft.api.call_form import CallForm
from graft.api.compile import CompiledModule
from graft.api.variant import Variant, VariantSettings, lower_variant
from graft.memory.initial import Initial
from graft.passes.config import load_config
from graft.passes.report import Report


def save_compiled(compiled: CompiledModule, path: str | Path, *, overwrite: bool = False) -> None:
    """State is saved as it is now, together with the initial values that reset brings back."""
    artifact = Artifact(
        tuple(saved_graph(variant) for variant in compiled.variants),
        compiled.backend,
        compiled.settings.config.kernels,
        {name: initial.value for name, initial in compiled.initial.items()},
        {
            "form": compiled.form.to_data(),
            "caches": compiled.cache_count,
            "reuse_outputs": compiled.settings.reuse_outputs,
        },
    )
    write_artifact(path, artifact, overwrite=overwrite)


def saved_graph(variant: Variant) -> SavedGraph:
    aliases = tuple(astuple(alias) for alias in variant.aliases)
    extra = {"returned": None if variant.returned is None else [list(position) for position in variant.returned]}
    return SavedGraph(variant.graph_module, variant.signature, aliases, variant.report.to_json(), extra)


def load_compiled(path: str | Path) -> CompiledModule:
    """The module of `compiled.save(path)`, going on from the state at that time, with the same report and aliases."""
    artifact = read_artifact(path)
    config = load_config({"kernels": dict(artifact.kernels)} if artifact.kernels else None)
    settings = VariantSettings(config, artifact.backend, artifact.extra["reuse_outputs"])
    variants = [load_graph(saved, settings, artifact.notes) for saved in artifact.graphs]
    initial = {name: Initial(value) for name, value in artifact.initial.items()}
    compiled = CompiledModule(variants, CallForm.from_data(artifact.extra["form"]), initial, settings)
    compiled.cache_count = artifact.extra["caches"]
    return compiled


def load_graph(saved: SavedGraph, settings: VariantSettings, notes: tuple[str, ...]) -> Variant:
    before = Report.from_json(saved.report)
    positions = saved.extra["returned"]
    returned = None if positions is None else tuple((path, number) for path, number in positions)
    variant = lower_variant(saved.graph_module, saved.signature, before, settings, returned)
    kernels = variant.report.kernels
    changed = {op: kernel for op, kernel in kernels.items() if before.kernels.get(op, kernel) != kernel}
    moved = [f"{op} was saved running {before.kernels[op]}; here it runs {kernel}" for op, kernel in changed.items()]
    every = tuple(dict.fromkeys((*before.notes, *variant.report.notes, *notes, *moved)))
    return replace(variant, report=replace(variant.report, notes=every))


load = load_compiled  # graft.load
