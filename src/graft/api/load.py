"""A compiled module from its folder: what graft.load does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from graft.api.artifact import Artifact, SavedGraph, read_artifact
from graft.api.call_form import CallForm, orders_from_data
from graft.api.compiled import CompiledModule
from graft.api.restart import Restart
from graft.api.variant import Variant, VariantSettings, lower_variant
from graft.base.errors import ArtifactError, DumpError
from graft.capture.containers import Container
from graft.memory.initial import Initial
from graft.passes.config import load_config
from graft.passes.library.fix_functionalization import NAME as FIX
from graft.passes.registry import load_all
from graft.passes.report import Report


def load_compiled(path: str | Path) -> CompiledModule:
    """The module of `compiled.save(path)`, going on from the state at that time, with the same report and aliases."""
    load_all()  # a graph may call ops of plugins
    artifact = read_artifact(path)
    try:
        return compiled_of(artifact)
    except DumpError as error:
        raise ArtifactError(path, f"cannot be loaded: {error}") from error


def compiled_of(artifact: Artifact) -> CompiledModule:
    fix = {FIX: {"enabled": artifact.extra.get(FIX, True)}}  # the one transform that runs again, in Inductor
    config = load_config({"kernels": dict(artifact.kernels), "transforms": fix})
    grad, notes = artifact.extra.get("grad", "refuse"), artifact.notes
    if grad == "honour":
        grad, notes = (
            "refuse",
            (*notes, "gradients: refused, since a loaded module has no program for backward to run"),
        )
    donate = tuple(artifact.extra.get("donate", ()))
    asked = {"mode": artifact.extra.get("mode"), "options": artifact.extra.get("options", {})}
    reuse = artifact.extra["reuse_outputs"]
    settings = VariantSettings(config, artifact.backend, reuse, grad=grad, donate=donate, **asked)
    variants = [load_graph(saved, settings, notes) for saved in artifact.graphs]
    initial = {name: Initial(value) for name, value in artifact.initial.items()}
    compiled = CompiledModule(variants, CallForm.from_data(artifact.extra["form"]), initial, settings)
    compiled.cache_count = artifact.extra["caches"]
    compiled.training = artifact.extra.get("training", True)
    compiled.restart = Restart.from_data(artifact.extra.get("restart"))
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
    results = Container.from_data(saved.extra.get("results"))
    made_by, modes = saved.extra.get("made_by", "compile"), saved.extra.get("modes")
    orders = orders_from_data(saved.extra.get("orders", ()))
    variant = replace(variant, modes=None if modes is None else tuple(modes), orders=orders)
    return replace(variant, report=replace(variant.report, notes=every), results=results, made_by=made_by)


load = load_compiled  # graft.load
