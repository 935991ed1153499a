"""Modules given as source that view, read and write their buffers and their caller's tensors, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

POSITIONS = ((2, 0), (1, 2), (0, 1))  # what is valid at the first step is valid at all
STEPS = len(POSITIONS)
SHAPES = {"self.a": (4, 6), "self.b": (3, 4), "self.n": (1,), "p": (4, 6), "q": (2, 4, 3), "x": (4, 6), "at": (2,)}
ARGUMENTS = ("p", "q", "x", "at")
LAYOUTS = ("contiguous", "contiguous", "transposed", "sliced", "stacked")


@dataclass(frozen=True)
class Program:
    """One module: `lines` is the body of its forward. `layout` is how its caller's tensors lie in memory."""

    lines: tuple[str, ...]
    dtype: torch.dtype
    layout: str
    seed: int

    @property
    def text(self) -> str:
        body = "\n    ".join(self.lines)
        return f"# {self.dtype}, seed {self.seed}, p and q {self.layout}\ndef forward(self, p, q, x, at):\n    {body}"

    def module(self) -> nn.Module:
        scope: dict[str, Any] = {"torch": torch}
        exec(self.text, scope)
        generator = torch.Generator().manual_seed(self.seed)
        return State(scope["forward"], whole(SHAPES["self.a"], self.dtype, generator), self.dtype)

    def caller(self) -> Caller:
        return Caller.of(self)


class State(nn.Module):
    """The buffers a, b and n (a counter), and the forward of a program."""

    def __init__(self, function: Callable[..., Any], first: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("a", first)
        self.register_buffer("b", torch.ones(SHAPES["self.b"], dtype=dtype))
        self.register_buffer("n", torch.zeros(SHAPES["self.n"], dtype=torch.int64), persistent=False)

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


@dataclass(frozen=True)
class Caller:
    """The caller's tensors of one program. `owners` are the whole memories, of which p and q may be a part."""

    caches: tuple[Tensor, ...]
    owners: tuple[Tensor, ...]
    plain: tuple[tuple[Tensor, Tensor], ...]  # x and at of each step

    @staticmethod
    def of(program: Program) -> Caller:
        generator = torch.Generator().manual_seed(program.seed + 1)
        placed = [place(SHAPES[name], program, generator) for name in ("p", "q")]
        plain = tuple(
            (whole(SHAPES["x"], program.dtype, generator), torch.tensor(positions)) for positions in POSITIONS
        )
        return Caller(tuple(p[0] for p in placed), tuple(p[1] for p in placed), plain)

    def args(self, step: int) -> tuple[Tensor, ...]:
        return (*self.caches, *self.plain[step])


def whole(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def place(shape: tuple[int, ...], program: Program, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A tensor of `shape` and the memory that it lies in."""
    *outer, last = shape
    if program.layout == "transposed":
        owner = whole((last, *outer), program.dtype, generator)
        return owner.movedim(0, -1), owner
    if program.layout == "sliced":
        owner = whole((*outer, 2 * last + 1), program.dtype, generator)
        return owner[..., 1::2], owner
    if program.layout == "stacked":
        owner = whole((2, *shape), program.dtype, generator)
        return owner[1], owner
    owner = whole(shape, program.dtype, generator)
    return owner, owner
