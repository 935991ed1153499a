"""What a backend gives, and what may be asked of Inductor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.ops.ran import OpKernels


@dataclass(frozen=True)
class Lowered:
    """A runnable graph, the kernel chosen for each op, and notes for the report. step: of the native backend, what an
    artifact keeps (backends/native/stored.py). later: notes on what is compiled when it is first called."""

    call: Callable[..., Any]
    backend: str
    kernels: Mapping[str, OpKernels] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    step: Any = None
    later: Callable[[], tuple[str, ...]] = tuple


@dataclass(frozen=True)
class InductorSettings:
    """What a caller asks of Inductor, as torch.compile names it, and whether graft's fix of its writes is on.

    observer: the key of who is told of each graph that the fix runs on (memory/inductor_fix).
    """

    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    fix: bool = True
    observer: str = ""
