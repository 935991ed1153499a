"""What a backend gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.ops.ran import OpKernels


@dataclass(frozen=True)
class Lowered:
    """A runnable graph, the kernel chosen for each op, and notes for the report."""

    call: Callable[..., Any]
    backend: str
    kernels: Mapping[str, OpKernels] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
