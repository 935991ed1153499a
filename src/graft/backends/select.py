"""Which backend lowers a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from graft.errors import UnknownBackend


@dataclass(frozen=True)
class Lowered:
    """A runnable graph, the kernel chosen for each op, and notes for the report."""

    call: Callable[..., Any]
    backend: str
    kernels: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


BACKENDS = ("auto", "eager", "inductor")


def lower(gm: GraphModule, backend: str = "auto", kernels: Mapping[str, str] | None = None) -> Lowered:
    """`kernels` names the kernel that an op must run; the others get the first that applies."""
    if backend not in BACKENDS:
        raise UnknownBackend(backend, BACKENDS)
    if backend == "inductor":
        from graft.backends.inductor import lower_inductor

        return lower_inductor(gm, kernels)
    from graft.backends.eager import lower_eager

    return lower_eager(gm, kernels or {})
