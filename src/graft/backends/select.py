"""Which backend lowers a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import GraphModule

from graft.errors import UnknownBackend, UsageError


@dataclass(frozen=True)
class Lowered:
    """A runnable graph, the kernel chosen for each op, and notes for the report."""

    call: Callable[..., Any]
    backend: str
    kernels: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


BACKENDS = ("auto", "eager", "inductor", "cuda_graph", "native")


def lower(
    gm: GraphModule,
    backend: str = "auto",
    kernels: Mapping[str, str] | None = None,
    *,
    reuse_outputs: bool = False,
) -> Lowered:
    """`kernels` names the kernel that an op must run; the others get the first that applies.

    `reuse_outputs` lets a CUDA graph return its own result buffers, which the next call overwrites.
    """
    if backend not in BACKENDS:
        raise UnknownBackend(backend, BACKENDS)
    if reuse_outputs and backend != "cuda_graph":
        raise UsageError(f"reuse_outputs is for backend='cuda_graph'; {backend!r} returns new tensors at every call")
    if backend == "cuda_graph":
        from graft.backends.cuda_graph import lower_cuda_graph

        lowered = lower_cuda_graph(gm, kernels, reuse_outputs=reuse_outputs)
    elif backend == "inductor":
        from graft.backends.inductor import lower_inductor

        lowered = lower_inductor(gm, kernels)
    elif backend == "native":
        from graft.backends.native.lower import lower_native

        lowered = lower_native(gm, kernels)
    else:
        from graft.backends.eager import lower_eager

        lowered = lower_eager(gm, kernels or {})
    idle = [op for op in kernels or {} if f"graft::{op}" not in lowered.kernels]
    notes = [f"kernels: the graph has no graft::{op}; it may have become part of a larger op" for op in idle]
    return replace(lowered, notes=(*lowered.notes, *notes))
