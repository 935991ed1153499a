"""Runs pieces of a graph on made-up inputs: what a numeric check of a rewrite needs.

A piece is cut out where its `boundary` says so; `Inputs` says what stands there (passes/numeric/inputs.py makes it up
from what is recorded).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import sympy
import torch
from torch.fx import Node, map_arg

from graft.base.errors import NumericCheckError
from graft.ir.effects import mutated_args, storage_root
from graft.ir.nodes import leaves, where
from graft.ir.subgraph import reached

# How each kind of input differs from standard normal values. Small ones show what eps does, zeros and subnormal ones
# divisions, large ones overflow; 1e15 squares to what float32 can still hold, 100 to what float16 can. Moderate and
# spread ones (of every magnitude from 1e-3 to 1e3) reach where a function bends or saturates, and so do rows with one
# outlier, of which a norm makes nearly the root of its length; one that is not a number, or two that are infinite,
# must not be lost.
INPUT_KINDS = (
    *("random", "small", "zeros", "large", "subnormal"),
    *("moderate", "negative", "spread", "outliers", "one NaN", "infinite"),
)

DATA_SIZE = 5  # what a size is made up as that depends on data


@dataclass(frozen=True)
class RecordedCall:
    """A node as it was when it was looked at; FX replaces argument tuples, so this stays true after edits."""

    op: str
    target: Any
    args: Any
    kwargs: Any
    index: int  # position in the graph


class Inputs(Protocol):
    """Values for boundary nodes and for state, the same for every piece that asks for them."""

    def at(self, node: Node) -> Any: ...

    def state(self, tensor: torch.Tensor) -> torch.Tensor: ...


def example_size(size: Any, node: Node) -> int:
    """The size that the example had; one that depends on data is made up."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    if size.node.hint is not None:
        return int(size.node.hint)
    symbols = size.node.expr.free_symbols
    if not all(str(symbol).startswith("u") for symbol in symbols):
        raise NumericCheckError(f"{where(node)} has the size {size}, which depends on data and on other sizes")
    return int(size.node.expr.xreplace(dict.fromkeys(symbols, sympy.Integer(DATA_SIZE))))


def fill(sizes: Iterable[int], dtype: torch.dtype, kind: str, generator: torch.Generator) -> torch.Tensor:
    sizes = tuple(sizes)
    if dtype is torch.bool:
        chosen = torch.rand(sizes, generator=generator) < 0.75
        if chosen.dim():
            chosen[..., :1] = True  # as a mask: every row attends to something
        return chosen
    if dtype.is_complex:
        return torch.randn(sizes, generator=generator, dtype=dtype)
    if not dtype.is_floating_point:
        return torch.randint(0, 2, sizes, generator=generator).to(dtype)  # valid as an index of anything
    normal = torch.randn(sizes, generator=generator, dtype=torch.float64)
    if kind == "spread":
        exponents = torch.rand(sizes, generator=generator, dtype=torch.float64) * 6 - 3
        return (10**exponents * normal.sign()).to(dtype)
    if kind == "negative":
        return (-2 * normal.abs()).to(dtype)
    if kind == "outliers":
        return with_outliers(normal).to(dtype)
    if kind in ("one NaN", "infinite"):
        return with_specials(normal, kind).to(dtype)
    factor = {
        "random": 1.0,
        "moderate": 8.0,
        "small": 1e-3,
        "zeros": 0.0,
        "large": 100.0 if dtype is torch.float16 else 1e15,
        "subnormal": torch.finfo(dtype).tiny / 8,
    }[kind]
    return (normal * factor).to(dtype)


def with_outliers(values: torch.Tensor) -> torch.Tensor:
    """One in each row is 50 or more, each in another column: in every tensor of these sizes in the same, as sums of
    two are to have one, too."""
    if values.dim() and values.numel():
        rows = values.view(-1, values.shape[-1])
        at = torch.arange(len(rows)), 7 * torch.arange(len(rows)) % rows.shape[-1]
        rows[at] = rows[at].sign() * 50 * (1 + rows[at].abs())
    return values


def with_specials(values: torch.Tensor, kind: str) -> torch.Tensor:
    """One value in the middle that is not a number, or one infinite value of each sign."""
    flat = values.view(-1)
    if kind == "one NaN":
        flat[len(flat) // 2 :][:1] = float("nan")
    else:
        flat[len(flat) // 3 :][:1] = float("inf")
        flat[2 * len(flat) // 3 :][:1] = -float("inf")
    return values


@dataclass(frozen=True)
class Subprogram:
    """A part of a graph that computes `outputs` from the nodes where `boundary` names a shared node.

    `calls` holds the whole graph. `writes`: calls for what they write, not for their results.
    """

    outputs: tuple[Node, ...]
    calls: Mapping[Node, RecordedCall]
    attributes: Callable[[str], Any]
    boundary: Callable[[Node], Node | None]
    writes: tuple[Node, ...] = ()

    def run(self, inputs: Inputs, call: Callable[..., Any]) -> list[Any]:
        """The outputs. `call(target, args, kwargs)` runs one op; it may write into what `inputs` gave."""
        values: dict[Node, Any] = {}
        for node in self.program:
            shared = self.boundary(node)
            made = self.calls[node]
            if shared is not None:
                values[node] = inputs.at(shared)
            elif made.op == "get_attr":
                values[node] = inputs.state(self.attributes(str(made.target)))
            else:
                args, kwargs = map_arg(made.args, values.__getitem__), map_arg(made.kwargs, values.__getitem__)
                values[node] = call(made.target, args, kwargs)
        return [values[node] for node in self.outputs]

    def written(self) -> set[Node]:
        """The shared nodes whose memory a call of the piece writes, by its schema."""
        roots = {storage_root(argument) for node in self.program for argument in mutated_args(node)}
        return {shared for root in roots if root in self.calls and (shared := self.boundary(root)) is not None}

    def shared(self) -> list[Node]:
        """What it reads from outside."""
        return list(dict.fromkeys(at for node in self.program if (at := self.boundary(node)) is not None))

    def nodes(self) -> list[Node]:
        """Every node of the piece, in the order of the graph."""
        return list(self.program)

    @cached_property
    def program(self) -> tuple[Node, ...]:
        def reads(node: Node) -> list[Node]:
            made = self.calls[node]
            given = leaves((made.args, made.kwargs)) if self.boundary(node) is None else ()
            return [leaf for leaf in given if isinstance(leaf, Node)]

        return tuple(sorted(reached((*self.outputs, *self.writes), reads), key=lambda node: self.calls[node].index))
