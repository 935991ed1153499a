"""The calls between column-split linear layers and the row-split one that ends them, found from that one upwards."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch.fx import GraphModule, Node

from graft.ir.io.text import op_text
from graft.ir.nodes import is_op, options_of, slice_args, static_int, tensor_of, where
from graft.ir.patterns.match import Refused
from graft.ir.subgraph import reached
from graft.passes.elementwise import is_pointwise
from graft.passes.library.merge.stacking import is_parameter
from graft.passes.library.shard.splits import (
    ATTENTION,
    LINEARS,
    RMS_NORM,
    SLICE,
    AxisSplit,
    Needs,
    Ranges,
    needs_of,
    share,
)

MUL, SWIGLU = torch.ops.aten.mul.Tensor, torch.ops.graft.swiglu.default


@dataclass
class SplitRegion:
    """splits: what this rank has of each value, the last first. needs: of the arguments of each call. columns: the
    linear layers that it has rows of. whole: values that every rank computes, and takes its part of."""

    row: Node
    splits: dict[Node, AxisSplit] = field(default_factory=dict)
    needs: dict[Node, Needs] = field(default_factory=dict)
    columns: list[Node] = field(default_factory=list)
    whole: list[Node] = field(default_factory=list)

    @property
    def attends(self) -> bool:
        return any(is_op(node, ATTENTION) for node in self.splits)

    @property
    def calls(self) -> list[Node]:
        """What is computed in part, in the order of the graph."""
        return sorted(node for node in self.splits if node.op == "call_function" and node not in self.whole)


def linear_parts(linear: Node) -> tuple[Node, Node, Node | None, int]:
    """Input, weight, bias, and the weight's axis of outputs."""
    if is_op(linear, LINEARS[0]):
        x, weight, *rest = linear.args
        return x, weight, rest[0] if rest else None, 0
    bias, x, weight = linear.args
    return x, weight, bias, 1


def problem_of(gm: GraphModule, linear: Node) -> str | None:
    """Why a linear layer cannot be split at all."""
    _, weight, bias, _ = linear_parts(linear)
    if not is_parameter(gm, weight) or not (bias is None or is_parameter(gm, bias)):
        return f"the weight or bias of {where(linear)} is not a parameter"
    if tensor_of(weight).dim() != 2 or linear.kwargs:
        return f"{where(linear)} is no plain matrix"
    return None


def find_region(gm: GraphModule, row: Node, taken: Collection[Node], rank: int, world: int) -> SplitRegion | None:
    """The region that ends with `row`; None where no linear layer begins one. Refused where one nearly does."""
    x, weight, _, outputs = linear_parts(row)
    width = static_int(tensor_of(weight).shape[1 - outputs]) if tensor_of(weight).dim() == 2 else None
    if width is None:
        return None
    attends, wanted = attention_above(x) is not None, AxisSplit(tensor_of(x).dim() - 1, share(width, rank, world))
    region, stopped = walk_up(gm, row, x, wanted, taken, norms=attends or is_inner_norm(x))
    if not region.columns and attends and stopped is not None:
        raise stopped
    if not region.columns:
        return None
    check(gm, region, width, world)
    return region


def is_inner_norm(x: Node) -> bool:
    """Whether a row-split layer reads a norm of a gated product, as BitNet's do: nothing but column-split layers is
    above it. A norm of the residual stream, or of one layer's result, is not worth a sum over the ranks."""
    if not is_op(x, RMS_NORM) or not is_op(x.args[0], MUL, SWIGLU):
        return False
    above = reached([x.args[0]], lambda node: node.all_input_nodes if by_element(node) else ())
    begins = [node for node in above if not by_element(node) and node.op != "get_attr"]
    return len(begins) > 1 and all(is_op(node, *LINEARS) for node in begins)


def by_element(node: Node) -> bool:
    return is_pointwise(node) or is_op(node, SWIGLU)


def walk_up(
    gm: GraphModule, row: Node, x: Node, split: AxisSplit, taken: Collection[Node], *, norms: bool
) -> tuple[SplitRegion, Refused | None]:
    """From the input of `row` to the layers whose columns are split, and what was first in the way."""
    region, stopped = SplitRegion(row), None
    wanted: dict[Node, list[tuple[Node, AxisSplit]]] = {x: [(row, split)]}
    while wanted:
        node = max(wanted)
        split = together(node, wanted.pop(node))
        region.splits[node] = split
        if node.op == "get_attr":
            region.whole += [] if is_parameter(gm, node) else [node]  # a buffer is sliced in the graph
            continue
        if is_op(node, *LINEARS) and node not in taken and problem_of(gm, node) is None:
            check_column(node, split)
            region.columns.append(node)
            continue
        try:
            needs = needs_of(node, split, norms=norms) if node.op == "call_function" else None
        except Refused as refused:
            needs, stopped = None, stopped or refused
        if needs is None:
            region.whole.append(node)
            continue
        region.needs[node] = needs
        for given, part in needs.items():
            wanted.setdefault(given, []).append((node, part))
    return region, stopped


def check(gm: GraphModule, region: SplitRegion, width: int, world: int) -> None:
    problem = problem_of(gm, region.row)
    if problem is not None:
        raise Refused(region.row, problem)
    if width % world:
        raise Refused(region.row, f"{where(region.row)}: {width} columns do not divide by {world} ranks")
    inside = {*region.calls, region.row}
    for node in region.calls:
        reader = next((user for user in node.users if user not in inside), None)
        if reader is not None:
            raise Refused(node, f"{where(node)} is read by {where(reader)} too, which needs all of it")
        for given, part in region.needs.get(node, {}).items():
            have = region.splits[given]
            if have != part and not takes_piece(node, have):
                raise Refused(node, f"{where(node)} needs another part of {where(given)} than others do")
    for node in region.whole:
        if len(region.splits[node].ranges) > 1:
            raise Refused(node, f"{where(node)} is {op_text(node)}, of which pieces are wanted")


def takes_piece(node: Node, have: AxisSplit) -> bool:
    """A slice of the axis that is split has its own idea of where a piece begins."""
    return is_op(node, SLICE) and slice_args(node)[0] == have.axis


def check_column(node: Node, split: AxisSplit) -> None:
    if split.axis != tensor_of(node).dim() - 1:
        raise Refused(node, f"{where(node)}: its rows would be split, and they are tokens")


def together(node: Node, wanted: list[tuple[Node, AxisSplit]]) -> AxisSplit:
    """All that the readers of a value want of it: the same part, or parts beside each other."""
    axes = {split.axis for _, split in wanted}
    if len(axes) > 1:
        raise Refused(node, f"{where(node)} would be split on axes {' and '.join(map(str, sorted(axes)))} at once")
    ranges: Ranges = tuple(sorted({pair for _, split in wanted for pair in split.ranges}))
    if any(a[1] > b[0] for a, b in pairwise(ranges)):
        raise Refused(node, f"{where(node)}: its readers want parts of it that overlap")
    return AxisSplit(axes.pop(), ranges)


def check_attention(row: Node, world: int) -> None:
    """Refused where the heads cannot be shared evenly."""
    attention = attention_above(linear_parts(row)[0])
    if attention is None:
        return
    heads, kv_heads = (int(tensor_of(options_of(attention)[name]).shape[1]) for name in ("q", "k"))
    if heads % world or (kv_heads % world and world % kv_heads):
        reason = f"{where(attention)}: {heads} heads ({kv_heads} for keys and values) do not divide by {world} ranks"
        raise Refused(attention, reason)


def attention_above(node: Node) -> Node | None:
    """The attention that a row-split layer's input comes from, itself or normed: other norms on the way are those of
    the residual stream."""
    seen, waiting = set(), [node]
    while waiting:
        here = waiting.pop()
        if here in seen or here.op != "call_function":
            continue
        seen.add(here)
        if is_op(here, ATTENTION):
            return here
        if is_op(here, *LINEARS) or (is_op(here, RMS_NORM) and here is not node):
            continue
        waiting += here.all_input_nodes
    return None
