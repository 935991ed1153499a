"""A compiled module as a folder: what CompiledModule.save does."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

from graft.api.artifact import Artifact, SavedGraph, write_artifact
from graft.api.call_form import PLAIN, orders_data
from graft.api.variant import Variant
from graft.base.errors import ArtifactError, DumpError
from graft.passes.library.fix_functionalization import NAME as FIX

if TYPE_CHECKING:
    from graft.api.compiled import CompiledModule


def save_compiled(compiled: CompiledModule, path: str | Path, *, overwrite: bool = False) -> None:
    """State is saved as it is now, together with the initial values that reset brings back."""
    code = [name for name, value in compiled.settings.options.items() if not isinstance(value, PLAIN)]
    if code:
        raise ArtifactError(path, f"cannot be written: options.{code[0]} is no plain value, and code is not saved")
    try:
        artifact = to_artifact(compiled)
    except DumpError as error:
        raise ArtifactError(path, f"cannot be written: {error}") from error
    write_artifact(path, artifact, overwrite=overwrite)


def to_artifact(compiled: CompiledModule) -> Artifact:
    return Artifact(
        tuple(saved_graph(variant) for variant in compiled.variants),
        compiled.backend,
        compiled.settings.config.kernels,
        {name: initial.value for name, initial in compiled.initial.items()},
        {
            "form": compiled.form.to_data(),
            "caches": compiled.cache_count,
            "reuse_outputs": compiled.settings.reuse_outputs,
            "grad": compiled.settings.grad,
            "donate": list(compiled.settings.donate),
            "training": compiled.training,
            "restart": compiled.restart and compiled.restart.to_data(),
            "mode": compiled.settings.mode,
            "options": dict(compiled.settings.options),
            FIX: compiled.settings.config.transforms[FIX].enabled,
        },
    )


def saved_graph(variant: Variant) -> SavedGraph:
    aliases = tuple(astuple(alias) for alias in variant.aliases)
    returned = None if variant.returned is None else [list(position) for position in variant.returned]
    extra = {"returned": returned, "results": variant.results and variant.results.to_data()}
    extra |= {"made_by": variant.made_by, "modes": variant.modes and list(variant.modes)}
    extra["orders"] = orders_data(variant.orders)
    return SavedGraph(variant.graph_module, variant.signature, aliases, variant.report_now.to_json(), extra)
