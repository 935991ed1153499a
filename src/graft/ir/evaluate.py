"""Runs pieces of a graph on made-up inputs: what a proof of a rewrite needs.

A piece is cut out where its `boundary` says so; values at the boundary are made from what is recorded there (sizes by
their example, strides, dtype). State is the module's own where it is real, and made up by storage where it is on the
meta device, so that views of one tensor stay views of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node, map_arg
from torch.fx.node import map_aggregate

from graft.base.errors import ProofError
from graft.ir.effects import is_mutating
from graft.ir.nodes import is_weight, leaves, val, where
from graft.ir.subgraph import reached

# How each kind of input differs from standard normal values. Small ones show what eps does, zeros and subnormal ones
# divisions, large ones overflow; 1e15 squares to what float32 can still hold, 100 to what float16 can.
INPUT_KINDS = ("random", "small", "zeros", "large", "subnormal")

DATA_SIZE = 5  # what a size is made up as that depends on data


@dataclass(frozen=True)
class RecordedCall:
    """A node as it was when it was looked at; FX replaces argument tuples, so this stays true after edits."""

    op: str
    target: Any
    args: Any
    kwargs: Any
    index: int  # position in the graph


@dataclass
class Inputs:
    """Values for boundary nodes and state, made on demand and the same for every piece that asks for them."""

    kind: str
    seed: int = 0
    values: dict[Node, Any] = field(default_factory=dict)
    storages: dict[int, torch.Tensor] = field(default_factory=dict)

    def at(self, node: Node) -> Any:
        if node not in self.values:
            generator = torch.Generator().manual_seed(self.seed + len(self.values))
            kind = "random" if is_weight(node) else self.kind
            self.values[node] = map_aggregate(val(node), lambda value: made_up(value, kind, generator, node))
        return self.values[node]

    def state(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, or for one on the meta device a made-up one at the same place of its storage."""
        if not tensor.is_meta:
            return tensor.detach()
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            count = storage.nbytes() // tensor.element_size()
            generator = torch.Generator().manual_seed(self.seed + count)
            self.storages[storage._cdata] = fill((count,), tensor.dtype, "random", generator)
        return self.storages[storage._cdata].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def made_up(value: Any, kind: str, generator: torch.Generator, node: Node) -> Any:
    """A value of the recorded kind: tensors filled, symbolic sizes as they were in the example."""
    if isinstance(value, torch.SymInt):
        return example_size(value, node)
    if not isinstance(value, torch.Tensor):
        return value
    sizes = [example_size(size, node) for size in value.shape]
    strides = [example_size(stride, node) for stride in value.stride()]
    device = "cpu" if value.is_meta else value.device
    filled = fill(sizes, value.dtype, kind, generator).to(device)
    if 0 in strides:  # expanded: several positions are one
        return filled
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=device).copy_(filled)


def example_size(size: Any, node: Node) -> int:
    """The size that the example had; one that depends on data is made up."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    if size.node.hint is not None:
        return int(size.node.hint)
    symbols = size.node.expr.free_symbols
    if not all(str(symbol).startswith("u") for symbol in symbols):
        raise ProofError(f"{where(node)} has the size {size}, which depends on data and on other sizes")
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
    factor = {
        "random": 1.0,
        "small": 1e-3,
        "zeros": 0.0,
        "large": 100.0 if dtype is torch.float16 else 1e15,
        "subnormal": torch.finfo(dtype).tiny / 8,
    }[kind]
    return (torch.randn(sizes, generator=generator, dtype=torch.float64) * factor).to(dtype)


@dataclass(frozen=True)
class Subprogram:
    """A part of a graph that computes `outputs` from the nodes where `boundary` names a shared node.

    `calls` holds the whole graph.
    """

    outputs: tuple[Node, ...]
    calls: Mapping[Node, RecordedCall]
    attributes: Callable[[str], Any]
    boundary: Callable[[Node], Node | None]

    def run(self, inputs: Inputs, call: Callable[..., Any], convert: Callable[[Any], Any]) -> list[Any]:
        """The outputs. `call(target, args, kwargs)` runs one op; `convert` is laid over every input value."""
        values: dict[Node, Any] = {}
        nodes = self.nodes()
        writes = any(is_mutating(node) for node in nodes)
        for node in nodes:
            shared = self.boundary(node)
            made = self.calls[node]
            if shared is not None:
                given = map_aggregate(inputs.at(shared), convert)
                values[node] = map_aggregate(given, copied) if writes else given
            elif made.op == "get_attr":
                held = convert(inputs.state(self.attributes(str(made.target))))
                values[node] = copied(held) if writes else held
            else:
                args, kwargs = map_arg(made.args, values.__getitem__), map_arg(made.kwargs, values.__getitem__)
                values[node] = call(made.target, args, kwargs)
        return [values[node] for node in self.outputs]

    def nodes(self) -> list[Node]:
        """Every node of the piece, in the order of the graph."""

        def reads(node: Node) -> list[Node]:
            made = self.calls[node]
            given = leaves((made.args, made.kwargs)) if self.boundary(node) is None else ()
            return [leaf for leaf in given if isinstance(leaf, Node)]

        return sorted(reached(self.outputs, reads), key=lambda node: self.calls[node].index)


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
