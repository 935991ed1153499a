"""The keyword arguments of graft.compile, checked, as the settings of every variant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graft.api.donation import as_names
from graft.api.gradients import check_mode
from graft.api.variant import VariantSettings
from graft.base.errors import UsageError
from graft.ir.nodes import OpOverload
from graft.ir.trace import EXPORT, DecompositionLevel
from graft.passes.config import PipelineConfig, load_config

STANCES = ("default", "error_on_new_variant")


def settings_of(
    config: str | Path | Mapping[str, Any] | PipelineConfig | None,
    backend: str,
    *,
    grad: str,
    donate: Sequence[str],
    mode: str | None,
    options: Mapping[str, Any] | None,
    decompositions: Mapping[Any, Callable[..., Any]] | None,
    fullgraph: bool,
    stance: str,
    **others: Any,
) -> VariantSettings:
    """Raises UsageError for what does not fit together."""
    backend = chosen_backend(backend, mode, options)
    check_mode(grad, backend)
    if stance not in STANCES:
        raise UsageError(f"stance must be {STANCES[0]!r} or {STANCES[1]!r}, but is {stance!r}")
    if not fullgraph:
        raise UsageError(
            "graft.compile captures a program as one graph and names what it cannot take; for graphs with breaks use"
            " torch.compile(model, backend='graft'), and leave out fullgraph=False"
        )
    return VariantSettings(
        config if isinstance(config, PipelineConfig) else load_config(config),
        backend,
        grad=grad,
        donate=as_names(donate),
        mode=mode,
        options=dict(options or {}),
        level=level_of(decompositions),
        frozen=stance == STANCES[1],
        **others,
    )


def chosen_backend(backend: str, mode: str | None, options: Mapping[str, Any] | None) -> str:
    """Inductor, where something is asked of it and no backend is named."""
    if mode is None and not options:
        return backend
    if backend not in ("auto", "inductor"):
        raise UsageError(f"mode and options are Inductor's, and the backend is {backend!r}; use backend='inductor'")
    return "inductor"


def level_of(decompositions: Mapping[Any, Callable[..., Any]] | None) -> DecompositionLevel:
    """Graphs and patterns are taken apart by the same table."""
    if not decompositions:
        return EXPORT
    for op in decompositions:
        if not isinstance(op, OpOverload):
            raise UsageError(
                f"decompositions maps overloads of ops to functions, as torch.ops.aten.silu.default; {op} is none"
            )
    name = " ".join(sorted(f"{op}:{id(function)}" for op, function in decompositions.items()))
    return DecompositionLevel(f"asked {name}", dict(decompositions), composite=True)
