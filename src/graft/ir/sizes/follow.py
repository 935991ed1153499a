"""Tensors that follow from sizes alone (masks made of arange, tril, comparisons…): evaluated without any input.

A subgraph qualifies when every node is one of the listed ops and every leaf is a size, a literal or a scalar constant
of the program. Static sizes are evaluated as they are; dynamic ones at several sample sizes, around every number
that the subgraph holds and beyond all that they combine to, because a band or an offset shows only in larger sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from graft.ir.edit import attribute
from graft.ir.effects import mutated_roots, storage_root, writers
from graft.ir.nodes import is_op, val
from graft.ir.sizes.bounds import number_bounds, values_depend_on

aten = torch.ops.aten
MAX_SIZE = 8300  # of a sample: a window of 4096 shows in it; numbers that need more are not decided
MAX_ELEMENTS = MAX_SIZE**2  # a larger tensor is not evaluated: 66 MiB as booleans
SMALL_SIZES = (2, 3, 5, 8)

POSITION_OPS = frozenset(
    {
        *(aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default),
        *(aten.full.default, aten.ones.default, aten.zeros.default, aten.scalar_tensor.default, aten.eye.default),
        *(aten.full_like.default, aten.ones_like.default, aten.zeros_like.default),
        *(aten.new_ones.default, aten.new_zeros.default, aten.new_full.default),
        *(aten.tril.default, aten.triu.default, aten.cumsum.default, aten.diff.default, aten.index.Tensor),
        *(getattr(getattr(aten, n), o) for n in ("le", "lt", "ge", "gt", "eq", "ne") for o in ("Tensor", "Scalar")),
        *(aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_not.default, aten.bitwise_xor.Tensor),
        *(aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor),
        *(aten.logical_and.default, aten.logical_or.default, aten.logical_not.default, aten.logical_xor.default),
        *(aten.where.self, aten.where.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf),
        *(aten.masked_fill.Scalar, aten.masked_fill.Tensor),
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.neg.default, aten.abs.default, aten.rsub.Scalar),
        *(aten.to.dtype, aten.clone.default, aten.contiguous.default, aten.lift_fresh_copy.default),
        *(aten.detach_.default, aten.detach.default, aten.alias.default),
        *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default, aten.reshape.default, aten.view.default),
        *(aten.expand.default, aten.slice.Tensor, aten.select.int, aten.transpose.int, aten.permute.default),
        *(aten.cat.default, aten.stack.default, aten.hstack.default, aten.repeat.default, aten.flip.default),
    }
)


@dataclass(frozen=True)
class Sample:
    """What the asked-for sizes and the tensor are at one choice of the dynamic sizes."""

    sizes: tuple[int, ...]
    tensor: torch.Tensor


class SizeEvaluator:
    """Evaluates such tensors of one graph. Results are kept: all layers share one mask."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.mutated = mutated_roots(gm.graph)
        self.parts: dict[Node, list[Node] | None] = {}
        self.kept: dict[Any, Any] = {}  # what callers found out, by what they asked

    def samples(self, node: Node, sizes: Sequence[Any]) -> list[Sample] | None:
        """`node` with what `sizes` are meanwhile, at every sample; None when it does not follow from sizes."""
        nodes = self.subgraph(node)
        if nodes is None:
            return None
        symbols, others = free_symbols(sizes), free_symbols([val(n) for n in nodes])
        others = [symbol for symbol in others if symbol not in symbols]
        if others and values_depend_on(nodes, others):
            return None
        bounds = number_bounds(nodes, self.constants(nodes), sizes) if symbols or others else set()
        points = list(sample_points(symbols, others, bounds))
        largest = max((elements(n, p) for n in nodes for p in points), default=0)
        if not points or largest > MAX_ELEMENTS:
            return None
        try:
            return [Sample(tuple(size_at(s, p) for s in sizes), self.run(nodes, p)) for p in points]
        except (RuntimeError, IndexError, ValueError, TypeError):  # sizes that these ops refuse: nothing is known
            return None

    def constants(self, nodes: Sequence[Node]) -> dict[Node, torch.Tensor]:
        return {node: value for node in nodes if (value := constant(self.gm, node)) is not None}

    def subgraph(self, root: Node) -> list[Node] | None:
        """The nodes that `root` is made of, in graph order, or None when one is not of the listed kind."""
        if root not in self.parts:
            self.parts[root] = self.collect(root)
        return self.parts[root]

    def collect(self, root: Node) -> list[Node] | None:
        found, todo = {root}, [root]
        while todo:
            node = todo.pop()
            if not self.qualifies(node):
                return None
            if not is_size(node):
                fresh = [n for n in node.all_input_nodes if n not in found]
                found.update(fresh)
                todo += fresh
        return sorted(found)

    def qualifies(self, node: Node) -> bool:
        if is_size(node):
            return True
        if storage_root(node) in self.mutated:
            return False
        return constant(self.gm, node) is not None or (node.op == "call_function" and node.target in POSITION_OPS)

    def run(self, nodes: Sequence[Node], point: Mapping[Any, int]) -> torch.Tensor:
        values: dict[Node, Any] = {}
        last_reader = {source: node for node in nodes for source in node.all_input_nodes}

        def given(leaf: Any) -> Any:
            if isinstance(leaf, Node):
                return values[leaf]
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        for node in nodes:
            if is_size(node):
                values[node] = size_at(val(node), point)
            elif node.op == "get_attr":
                values[node] = constant(self.gm, node)
            else:
                values[node] = node.target(*map_aggregate(node.args, given), **map_aggregate(node.kwargs, given))
                for source in node.all_input_nodes:
                    if last_reader[source] is node:
                        del values[source]
        return values[nodes[-1]]


def is_size(node: Node) -> bool:
    return isinstance(val(node), (int, torch.SymInt))


def constant(gm: GraphModule, node: Any) -> torch.Tensor | None:
    """A scalar that export lifted out of the program (`torch.tensor(0.0)`): a literal, not state of the module."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    if not str(node.target).rpartition(".")[2].startswith("lifted_tensor_"):
        return None
    value = attribute(gm, str(node.target))
    plain = type(value) is torch.Tensor and value.dim() == 0 and not value.is_meta
    return value.cpu() if plain else None


def number(gm: GraphModule, value: Any) -> float | None:
    """The Python number that an argument stands for: itself, or a tensor that holds it everywhere."""
    while is_op(value, *SAME_NUMBER):
        if writers(storage_root(value)):
            return None
        value = value.args[0]
    if not isinstance(value, Node):
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    if writers(storage_root(value)):
        return None
    held = None
    if is_op(value, aten.full.default, aten.full_like.default):
        held = value.args[1]
    elif is_op(value, aten.scalar_tensor.default):
        held = value.args[0]
    elif is_op(value, aten.zeros.default, aten.zeros_like.default):
        held = 0.0
    elif (tensor := constant(gm, value)) is not None:
        held = tensor.item()
    if not isinstance(held, (int, float)) or isinstance(held, bool):
        return None
    return float(torch.tensor(held, dtype=val(value).dtype).item())


SAME_NUMBER = (
    *(aten.lift_fresh_copy.default, aten.detach_.default, aten.expand.default, aten.reshape.default),
    aten.unsqueeze.default,
)


def size_at(size: Any, point: Mapping[Any, int]) -> int:
    return size if isinstance(size, int) else int(size.node.expr.xreplace(dict(point)))


def elements(node: Node, point: Mapping[Any, int]) -> int:
    """How many elements a node has at a sample; symbols that are not sampled come from values nobody evaluates."""
    value = val(node)
    plain = isinstance(value, torch.Tensor) and not is_op(node, aten.expand.default)  # an expanded one has no memory
    return math.prod(size_at(s, point) for s in value.shape) if plain else 0


def free_symbols(values: Sequence[Any]) -> list[Any]:
    flat = (s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else [v]))
    symbols = {symbol for s in flat if isinstance(s, torch.SymInt) for symbol in s.node.expr.free_symbols}
    return sorted(symbols, key=str)


def sample_points(symbols: Sequence[Any], others: Sequence[Any], bounds: set[int]) -> Iterator[dict[Any, int]]:
    """Values for the symbols: all equal, growing and falling, around every bound and beyond twice the largest.

    `others`, which only spread values, stay one. Nothing at all where that takes too large a sample.
    """
    ones = dict.fromkeys(others, 1)
    if not symbols:
        yield ones
        return
    beyond = 2 * max(bounds, default=0) + 4
    if beyond + 3 * len(symbols) > MAX_SIZE:
        return
    around = {size for n in bounds for size in (n - 1, n, n + 1, n + 3)}
    for size in sorted({*SMALL_SIZES, *(s for s in around if s > 1), beyond, beyond + 3}):
        yield {**ones, **dict.fromkeys(symbols, size)}
        if len(symbols) > 1:
            yield {**ones, **{symbol: size + 3 * i for i, symbol in enumerate(symbols)}}
            yield {**ones, **{symbol: size + 3 * i for i, symbol in enumerate(reversed(symbols))}}
            for small in symbols:
                yield {**ones, **dict.fromkeys(symbols, size), small: 2}
