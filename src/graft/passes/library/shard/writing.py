"""The calls of one rank: the same calls on parts of the values, and a sum over the ranks behind them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node, map_arg

from graft.ir.edit import Editor
from graft.ir.nodes import is_op, options_of, slice_args, tensor_of
from graft.passes.library.shard.regions import SplitRegion, linear_parts
from graft.passes.library.shard.splits import LINEARS, RMS_NORM, SIZED, SLICE, AxisSplit
from graft.passes.library.shard.weights import Shards

aten, ops = torch.ops.aten, torch.ops.graft


@dataclass
class Twins:
    """Writes the part of one region. parts: each value that is computed in part, with that part."""

    editor: Editor
    shards: Shards
    region: SplitRegion
    world: int
    parts: dict[Node, Node] = field(default_factory=dict)
    made: list[Node] = field(default_factory=list)

    def write(self) -> list[Node]:
        for node in sorted(self.region.splits):
            self.parts[node] = self.part(node, self.region.splits[node])
        self.made.append(self.row())
        return self.made

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, like: Node) -> Node:
        node = self.editor.call(target, args, kwargs, before=like, like=like)
        self.made.append(node)
        return node

    def part(self, node: Node, split: AxisSplit) -> Node:
        if node in self.region.whole:
            ((first, last),) = split.ranges
            reader = next(
                user for user in sorted(node.users) if user in self.region.splits or user is self.region.row
            )
            value = self.editor.current(node)
            made = self.editor.call(SLICE, (value, split.axis, first, last), before=reader, like=reader)
            self.made.append(made)
            return made
        if node.op == "get_attr":
            return self.shard(node, split.axis, split, next(user for user in sorted(node.users)))
        if is_op(node, *LINEARS):
            return self.column(node, split)
        if is_op(node, SLICE) and slice_args(node)[0] == split.axis:
            return self.piece(node)
        if is_op(node, RMS_NORM) and split.axis == tensor_of(node).dim() - 1:
            return self.norm_over_ranks(node, split)
        needed = self.region.needs[node]
        args, kwargs = (
            map_arg(given, lambda n: self.parts[n] if n in needed else n) for given in (node.args, node.kwargs)
        )
        if is_op(node, *SIZED):
            sizes = list(args[1])
            if sizes[split.axis] != -1:
                sizes[split.axis] = split.size
            args = (args[0], sizes)
        return self.call(node.target, args, kwargs, like=node)

    def shard(self, weight: Node, axis: int, split: AxisSplit, reader: Node) -> Node:
        node = self.shards.part(weight, axis, split.ranges, before=reader)
        self.made.append(node)
        return node

    def column(self, node: Node, split: AxisSplit) -> Node:
        """Rows of the weight and of the bias; each rank reads the whole input."""
        x, weight, bias, outputs = linear_parts(node)
        rows = self.shard(weight, outputs, split, node)
        offset = None if bias is None else self.shard(bias, 0, split, node)
        if outputs:
            return self.call(node.target, (offset, x, rows), like=node)
        return self.call(node.target, (x, rows) if offset is None else (x, rows, offset), like=node)

    def piece(self, node: Node) -> Node:
        """Where the piece lies in the part; nothing to take where it is all of that."""
        source = node.args[0]
        wanted, have = self.region.needs[node][source], self.region.splits[source]
        if wanted.ranges == have.ranges:
            return self.parts[source]
        before = sum(last - first for first, last in have.ranges if first < wanted.ranges[0][0])
        return self.call(SLICE, (self.parts[source], have.axis, before, before + wanted.size), like=node)

    def norm_over_ranks(self, node: Node, split: AxisSplit) -> Node:
        """An RMSNorm over all heads: each rank sums the squares of its own, in float32, as ops/rms_norm does. Heads
        that several ranks have are counted by each of them, all equally often."""
        given = options_of(node)
        x, weight = self.parts[given["x"]], self.parts[given["weight"]]
        own = tensor_of(x).dtype
        wide = x if own is torch.float32 else self.call(aten.to.dtype, (x, torch.float32), like=node)
        squares = self.call(aten.pow.Tensor_Scalar, (wide, 2), like=node)
        total = self.call(aten.sum.dim_IntList, (squares, [-1], True), like=node)
        total = self.call(ops.all_reduce.default, (total, self.world), like=node)
        mean = self.call(aten.div.Tensor, (total, split.size * self.world), like=node)
        mean = self.call(aten.add.Tensor, (mean, given["eps"]), like=node)
        scale = self.call(aten.rsqrt.default, (mean,), like=node)
        normed = self.call(aten.mul.Tensor, (wide, scale), like=node)
        row = given["dtype"] or own
        if not given["cast_last"]:
            normed = normed if row is torch.float32 else self.call(aten.to.dtype, (normed, row), like=node)
            return self.call(aten.mul.Tensor, (weight, normed), like=node)
        if tensor_of(weight).dtype is not torch.float32:
            weight = self.call(aten.to.dtype, (weight, torch.float32), like=node)
        if given["offset"]:
            weight = self.call(aten.add.Tensor, (weight, given["offset"]), like=node)
        normed = self.call(aten.mul.Tensor, (normed, weight), like=node)
        return normed if row is torch.float32 else self.call(aten.to.dtype, (normed, row), like=node)

    def row(self) -> Node:
        """Columns of the weight, the sum over the ranks, and then the bias: once, not once a rank."""
        node = self.region.row
        x, weight, bias, outputs = linear_parts(node)
        columns = self.shard(weight, 1 - outputs, AxisSplit(1 - outputs, self.region.splits[x].ranges), node)
        if outputs:
            partial = self.call(aten.mm.default, (self.parts[x], columns), like=node)
        else:
            partial = self.call(aten.linear.default, (self.parts[x], columns), like=node)
        return self.reduced(node, partial, bias)

    def reduced(self, node: Node, partial: Node, bias: Node | None) -> Node:
        total = self.call(ops.all_reduce.default, (partial, self.world), like=node)
        if bias is not None:
            total = self.call(aten.add.Tensor, (total, bias), like=node)
        self.editor.replace(node, total)
        return total
