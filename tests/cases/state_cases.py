"""Named programs over caches and other state: what each writes, who owns it, and the steps it is called with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import graft

BACKENDS = ("eager", "inductor")


class Stateful(nn.Module):
    """A function of (self, *inputs), and buffers."""

    def __init__(self, function: Callable[..., Any], **buffers: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


@dataclass(frozen=True)
class Case:
    """`caches` are the caller's and come first in every call; `steps` are the other arguments of each call."""

    function: Callable[..., Any]
    steps: Sequence[tuple[Any, ...]]
    caches: tuple[Tensor, ...] = ()
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass
class Side:
    """One of the two that are compared."""

    module: nn.Module
    caches: tuple[Tensor, ...]
    steps: Sequence[tuple[Any, ...]]
    results: list[Any] = field(default_factory=list)

    @staticmethod
    def of(case: Case) -> Side:
        caches, buffers, steps = copy.deepcopy((case.caches, dict(case.buffers), list(case.steps)))
        return Side(Stateful(case.function, **buffers), caches, steps)

    def memory(self) -> dict[str, Tensor]:
        """Buffers, caches, plain inputs and all results so far."""
        found = {f"buffer {name}": buffer for name, buffer in self.module.named_buffers()}
        groups = (("cache", self.caches), ("input", self.steps), ("result", self.results))
        for name, values in groups:
            tensors = (v for v in pytree.tree_leaves(values) if isinstance(v, Tensor))
            found |= {f"{name} {place}": value for place, value in enumerate(tensors)}
        return found


class Together(nn.Module):
    """Several cases in one graph, so that Inductor compiles once."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.cases = nn.ModuleList(modules)

    def forward(self, inputs: list[tuple[Any, ...]]) -> list[Any]:
        return [module(*args) for module, args in zip(self.cases, inputs, strict=True)]


def agree(case: Case, backend: str, dynamic_shapes: Any = None) -> Any:
    """Runs all steps compiled and in eager and compares after each. Returns the compiled module."""
    return agree_all({"": case}, backend, dynamic_shapes, alone=True)


def agree_all(cases: Mapping[str, Case], backend: str, dynamic_shapes: Any = None, *, alone: bool = False) -> Any:
    """The same for several cases of equally many steps, compiled as one module."""
    expected, got = ({name: Side.of(case) for name, case in cases.items()} for _ in range(2))
    homes = {name: {n: v.data_ptr() for n, v in side.memory().items()} for name, side in got.items()}
    sides = list(got.values())

    def inputs(step: int) -> list[tuple[Any, ...]]:
        return [(*side.caches, *side.steps[step]) for side in sides]

    module, args = (sides[0].module, inputs(0)[0]) if alone else (Together([s.module for s in sides]), (inputs(0),))
    before = {name: snapshot(side) for name, side in got.items()}
    compiled = graft.compile(module, args, dynamic_shapes=dynamic_shapes, backend=backend)
    for name, side in got.items():
        assert_equal(name, "by compilation", before[name], side.memory())
    for step in range(len(sides[0].steps)):
        results = [compiled(*inputs(step)[0])] if alone else compiled(inputs(step))
        for (name, left), right, result in zip(expected.items(), sides, results, strict=True):
            with torch.no_grad():
                left.results.append(left.module(*left.caches, *left.steps[step]))
            right.results.append(result)
            assert type(result) is type(left.results[-1]), name
            assert_equal(name, f"step {step}", left.memory(), right.memory())
            now = right.memory()
            moved = [n for n, pointer in homes[name].items() if now[n].data_ptr() != pointer]
            assert not moved, f"{name}: {moved} lie elsewhere after step {step}"
    return compiled


def snapshot(side: Side) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in side.memory().items()}


def assert_equal(case: str, when: str, left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys(), (case, when)
    for name, value in left.items():
        torch.testing.assert_close(right[name], value, msg=lambda text, n=name: f"{case}, {when}: {n}: {text}")


def whole(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Small whole numbers, exact in every dtype."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
