"""What a piece costs now and would cost as one kernel: bytes, launches, microseconds, at stated sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from graft.ir.nodes import is_op, leaves, placeholders, static_int, val
from graft.workbench.discover.calls import LOOKUPS, is_call, is_free
from graft.workbench.discover.regions import CandidateRegion


@dataclass(frozen=True)
class Machine:
    """What a byte and a launch are taken to cost. The defaults were measured on an H200 (docs/performance.md):
    reading at 4.62 TB/s, and 1.5 µs for a small kernel that goes away inside a CUDA graph."""

    bandwidth_gb_s: float = 4620.0
    launch_us: float = 1.5
    source: str = "measured on an H200 (docs/performance.md)"

    def microseconds(self, launches: float, moved: float) -> float:
        return launches * self.launch_us + moved / (self.bandwidth_gb_s * 1e3)


def machine_of(bandwidth_gb_s: float | None = None, launch_us: float | None = None) -> Machine:
    """The defaults, or what the caller measured."""
    if bandwidth_gb_s is None and launch_us is None:
        return Machine()
    plain = Machine()
    given = bandwidth_gb_s if bandwidth_gb_s is not None else plain.bandwidth_gb_s
    cost = launch_us if launch_us is not None else plain.launch_us
    return Machine(given, cost, "as given")


@dataclass(frozen=True)
class Estimate:
    """All sites of a candidate together, for one count of tokens in a step."""

    tokens: int
    launches_now: int
    launches_after: int
    bytes_now: int
    bytes_after: int
    saving_us: float
    share: float  # of the modelled step


@dataclass(frozen=True)
class SymbolValues:
    """Numbers for the symbols of a graph. Equal layers share their values, so what one takes is kept by value."""

    values: dict[str, int]
    known: dict[int, tuple[Any, int]] = field(default_factory=dict)  # the value is held, so that its id stays its own

    def of(self, size: Any) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        return int(expression.xreplace({s: self.values.get(str(s), 1) for s in expression.free_symbols}))

    def count(self, value: torch.Tensor) -> int:
        """Elements in memory: a dim that is expanded has one."""
        pairs = zip(value.shape, value.stride(), strict=True)
        return math.prod(1 if type(stride) is int and stride == 0 else self.of(size) for size, stride in pairs)

    def bytes(self, node: Node) -> int:
        value = val(node)
        if id(value) not in self.known:
            tensors = [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
            self.known[id(value)] = (value, sum(self.count(t) * t.element_size() for t in tensors))
        return self.known[id(value)][1]


def sizes_for(graph: Graph, tokens: int) -> SymbolValues:
    """Batch 1: the tokens are the second size of the first input that is dynamic in both, else its dynamic one."""
    values: dict[str, int] = {}
    for node in placeholders(graph):
        shape = list(getattr(val(node), "shape", ()))[:2]
        open_sizes = [str(size) for size in shape if isinstance(size, torch.SymInt) and static_int(size) is None]
        plain = [name for name in open_sizes if name.isidentifier()]
        if plain:
            values = {name: 1 for name in plain[:-1]} | {plain[-1]: tokens}
            break
    return SymbolValues(values)


def size_notes(graph: Graph, steps: Sequence[StepEstimate]) -> tuple[str, ...]:
    """`s44 = 1`, `s70 = 1 and 512`: what every symbol was taken for."""
    values = {id(v): v for n in graph.nodes for v in leaves(val(n)) if isinstance(v, torch.Tensor)}
    flat = [size for value in values.values() for size in value.shape if isinstance(size, torch.SymInt)]
    notes = []
    for name in sorted({str(symbol) for size in flat for symbol in size.node.expr.free_symbols}):
        taken = dict.fromkeys(step.sizes.values.get(name, 1) for step in steps)
        data = " (decided by data)" if name.startswith("u") else ""
        notes.append(f"{name} = {' and '.join(map(str, taken))}{data}")
    return tuple(notes)


def call_bytes(node: Node, sizes: SymbolValues) -> int:
    """Every input once and every result once; of a table that is looked up in, as much as comes out."""
    written = sizes.bytes(node)
    if is_op(node, *LOOKUPS):
        return 2 * written
    return written + sum(sizes.bytes(source) for source in node.all_input_nodes)


def cost(nodes: Iterable[Node], sizes: SymbolValues) -> tuple[int, int]:
    """Launches and bytes, call by call."""
    calls = [node for node in nodes if is_call(node) and not is_free(node)]
    return len(calls), sum(call_bytes(node, sizes) for node in calls)


def fused_bytes(piece: CandidateRegion, sizes: SymbolValues) -> int:
    """As one kernel: what comes in and what goes out."""
    return sum(sizes.bytes(node) for node in (*piece.inputs(), *piece.outputs()))


@dataclass(frozen=True)
class StepEstimate:
    """A step of so many tokens: its sizes, and the microseconds of the whole graph by the same model."""

    tokens: int
    sizes: SymbolValues
    microseconds: float


def step_of(graph: Graph, tokens: int, machine: Machine) -> StepEstimate:
    sizes = sizes_for(graph, tokens)
    return StepEstimate(tokens, sizes, machine.microseconds(*cost(graph.nodes, sizes)))
