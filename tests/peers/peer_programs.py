"""A program, what it is given, and what is expected of it on every route; tables of them (mutation.py and so on).

A program is a function of its inputs, or a module class. Expected is what eager does on fresh inputs: results, writes
into inputs and state, who shares memory with whom, layouts, call after call. The rest is said in the table:
`fires` names fusions and how often, `refused` the error of a route, `gaps` what does not hold yet (a strict xfail).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Inputs = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Program:
    name: str
    source: Any  # a function, or a class of modules
    inputs: Inputs
    calls: int = 2
    dynamic: Any = None  # dynamic_shapes for graft.compile
    fires: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)  # route → part of the message; "" is every route
    gaps: Mapping[str, str] = field(default_factory=dict)  # route → what does not hold yet; "" is every route
    routes: tuple[str, ...] = ()  # where it makes sense; everywhere if none are named
    layouts: bool = True  # whether strides are compared
    close: bool = False  # kernels round differently: to a tolerance instead of bit for bit
    config: Any = None  # for graft.compile and graft.Backend
    alone: bool = False  # in no batch: there torch's own compiler may have it, or open sizes of others

    def make(self) -> Callable[..., Any]:
        """The function, or a module with the same weights each time."""
        if not isinstance(self.source, type):
            return self.source
        torch.manual_seed(0)
        return self.source().eval()


class Table:
    """Programs of one class, by the names of their functions."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.programs: list[Program] = []

    def add(self, inputs: Inputs, **expected: Any) -> Callable[[Any], Any]:
        def note(source: Any) -> Any:
            self.programs.append(Program(f"{self.name}.{source.__name__}", source, inputs, **expected))
            return source

        return note


def ramp(*shape: int, start: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, so that sums are exact in any order; memory of its own."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) % 7 + start).to(dtype)).reshape(shape).clone()


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(*values: int) -> torch.Tensor:
    return torch.tensor(values)
