"""Tensors that follow from sizes alone (masks made of arange, tril, comparisons…): evaluated without any input.

A subgraph qualifies when every node is one of the listed ops and every leaf is a size, a literal or a scalar constant
of the program. Static sizes are evaluated as they are; dynamic ones at several sample sizes, around every integer
that the subgraph holds, because a band or an offset shows only in sizes larger than it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from graft.graph.edit import attribute
from graft.graph.nodes import is_mutating, is_op, leaves, mutated_args, storage_root, val

aten = torch.ops.aten
MAX_ELEMENTS = 2**26  # a larger tensor is not evaluated: 64 MiB as booleans
MAX_LITERAL = 4096  # a mask with a larger integer would need larger samples than that
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
        writers = [n for n in gm.graph.nodes if is_mutating(n) and n.target is not aten.detach_.default]
        self.mutated = {storage_root(a) for n in writers for a in mutated_args(n)}  # detach_ changes no value
        self.parts: dict[Node, list[Node] | None] = {}
        self.kept: dict[Any, Any] = {}  # what callers found out, by what they asked

    def samples(self, node: Node, sizes: Sequence[Any]) -> list[Sample] | None:
        """`node` with what `sizes` are meanwhile, at every sample; None when it does not follow from sizes."""
        nodes = self.subgraph(node)
        if nodes is None:
            return None
        symbols, others = free_symbols(sizes), free_symbols([val(n) for n in nodes])
        points = list(sample_points(symbols, [s for s in others if s not in symbols], int_literals(nodes)))
        largest = max((elements(n, p) for n in nodes for p in points), default=0)
        if not points or largest > MAX_ELEMENTS:
            return None
        try:
            return [Sample(tuple(size_at(s, p) for s in sizes), self.run(nodes, p)) for p in points]
        except (RuntimeError, IndexError, ValueError, TypeError):  # sizes that these ops refuse: nothing is known
            return None

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
        if is_size(node) or constant(self.gm, node) is not None:
            return True
        return node.op == "call_function" and node.target in POSITION_OPS and storage_root(node) not in self.mutated

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
        value = value.args[0]
    if not isinstance(value, Node):
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
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
    return math.prod(size_at(s, point) for s in value.shape) if isinstance(value, torch.Tensor) else 0


def free_symbols(values: Sequence[Any]) -> list[Any]:
    flat = (s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else [v]))
    symbols = {symbol for s in flat if isinstance(s, torch.SymInt) for symbol in s.node.expr.free_symbols}
    return sorted(symbols, key=str)


def int_literals(nodes: Sequence[Node]) -> set[int]:
    """Integers among the arguments that could be an offset or a band; an open end of a slice is none."""
    given = (leaf for n in nodes for leaf in leaves((n.args, n.kwargs)) if not is_size(n))
    plain = {abs(leaf) for leaf in given if isinstance(leaf, int) and not isinstance(leaf, bool)}
    return {literal for literal in plain if 1 < literal < 2**62}


def sample_points(symbols: Sequence[Any], others: Sequence[Any], literals: set[int]) -> Iterator[dict[Any, int]]:
    """Values for the symbols: all equal, growing and falling, below and above every literal; `others` stay small.

    Nothing at all where a literal is too large to sample around: nothing is known then.
    """
    if not symbols and not others:
        yield {}
        return
    if any(literal > MAX_LITERAL for literal in literals):
        return
    small_ones, large_ones = (
        {n for n in literals if n <= MAX_LITERAL // 8},
        {n for n in literals if n > MAX_LITERAL // 8},
    )
    around = {size for n in small_ones for size in (n - 1, n, n + 1, n + 3)} | {n + 1 for n in large_ones}
    for size in sorted({*SMALL_SIZES, *(s for s in around if s > 1)}):
        small = dict.fromkeys(others, 2)
        yield {**small, **dict.fromkeys(symbols, size)}
        if len(symbols) > 1 and size <= 2 * max(SMALL_SIZES):
            yield {**small, **{symbol: size + 3 * i for i, symbol in enumerate(symbols)}}
            yield {**small, **{symbol: size + 3 * i for i, symbol in enumerate(reversed(symbols))}}
