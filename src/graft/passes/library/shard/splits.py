"""What a rank has of a value: some ranges of one axis; and what it needs for that of other values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Node

from graft.ir.canonical.normal_form import is_random
from graft.ir.io.text import op_text
from graft.ir.nodes import is_op, options_of, slice_args, static_int, tensor_of, tensor_val, where
from graft.ir.patterns.match import Refused
from graft.passes.elementwise import is_pointwise

aten, ops = torch.ops.aten, torch.ops.graft
Ranges = tuple[tuple[int, int], ...]
RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
COPIES = (aten.contiguous.default, aten.clone.default, aten.alias.default)
SLICE, EXPAND = aten.slice.Tensor, aten.expand.default
SIZED = (*RESHAPES, EXPAND)  # calls that are told the sizes of their result
LINEARS = (aten.linear.default, aten.addmm.default)
ATTENTION, RMS_NORM, LAYER_NORM = ops.attention.default, ops.rms_norm.default, ops.layer_norm.default


@dataclass(frozen=True)
class AxisSplit:
    """The ranges of `axis`, in order, that a rank has; side by side they are its part."""

    axis: int
    ranges: Ranges

    @property
    def size(self) -> int:
        return sum(last - first for first, last in self.ranges)

    def scaled(self, axis: int, by: int, through: int, node: Node) -> AxisSplit:
        """The same elements on another axis, whose steps are `through` where those of this one are `by`."""
        edges = [edge * by for pair in self.ranges for edge in pair]
        if any(edge % through for edge in edges):
            cut = next(edge for edge in edges if edge % through)
            raise Refused(node, f"{where(node)}: a cut at {cut} goes through one of its parts of {through}")
        return AxisSplit(axis, tuple((a * by // through, b * by // through) for a, b in self.ranges))


Needs = dict[Node, AxisSplit]  # of the arguments of a call; the others are needed whole


def share(size: int, rank: int, world: int) -> Ranges:
    return ((size * rank // world, size * (rank + 1) // world),)


def kv_share(heads: int, kv_heads: int, wanted: Ranges, node: Node) -> Ranges:
    """The key-value heads that some query heads read. Fewer heads than ranks: several ranks have the same one."""
    if len(wanted) != 1:
        raise Refused(node, f"{where(node)}: its heads are wanted in {len(wanted)} pieces")
    ((first, last),), group = wanted, heads // kv_heads
    if (last - first) % group and (first // group != (last - 1) // group or group % (last - first)):
        raise Refused(node, f"{where(node)}: query heads {first} to {last - 1} of {heads} share {kv_heads} uneven")
    return ((first // group, (last - 1) // group + 1),)


# ── what a call needs of its arguments for a part of its result ─────────────────────────────────────────────────


def reshape_needs(node: Node, split: AxisSplit) -> Needs:
    into, of = tensor_of(node).shape, tensor_of(node.args[0]).shape
    step = steps(into, split.axis)
    span = None if step is None else static_int(into[split.axis])
    if step is None or span is None:
        raise Refused(node, f"{where(node)}: the axis that is split is not known to be so large")
    for axis in range(len(of)):
        inner, size = steps(of, axis), static_int(of[axis])
        if inner is not None and size is not None and size > 1 and inner * size == step * span:
            return {node.args[0]: split.scaled(axis, step, inner, node)}
    raise Refused(node, f"{where(node)}: no axis of {list(of)} is the one that is split in {list(into)}")


def steps(shape: Iterable[object], axis: int) -> int | None:
    """How many elements lie from one index of an axis to the next."""
    sizes = [static_int(size) for size in list(shape)[axis + 1 :]]
    return None if None in sizes else prod(size for size in sizes if size is not None)


def transpose_needs(node: Node, split: AxisSplit) -> Needs:
    dims = tensor_of(node).dim()
    one, other = (int(dim) % dims for dim in node.args[1:3])
    return {node.args[0]: AxisSplit({one: other, other: one}.get(split.axis, split.axis), split.ranges)}


def permute_needs(node: Node, split: AxisSplit) -> Needs:
    return {node.args[0]: AxisSplit(node.args[1][split.axis] % tensor_of(node).dim(), split.ranges)}


def unsqueeze_needs(node: Node, split: AxisSplit) -> Needs:
    at = node.args[1] % tensor_of(node).dim()
    return {node.args[0]: AxisSplit(split.axis - (at < split.axis), split.ranges)}


def slice_needs(node: Node, split: AxisSplit) -> Needs:
    dim, start, end, step = slice_args(node)
    if dim != split.axis:
        return {node.args[0]: split}
    if start is None or end is None or step != 1:
        raise Refused(node, f"{where(node)} takes a piece of the axis that is split, and not a known one")
    return {node.args[0]: AxisSplit(dim, tuple((start + a, start + b) for a, b in split.ranges))}


def cat_needs(node: Node, split: AxisSplit) -> Needs:
    given = options_of(node)
    if given["dim"] % tensor_of(node).dim() == split.axis:
        raise Refused(node, f"{where(node)} joins its parts along the axis that is split")
    return dict.fromkeys(given["tensors"], split)


def broadcast_needs(node: Node, split: AxisSplit) -> Needs:
    """Each argument at its place from the right; one that has a single element there is needed whole."""
    from_right = split.axis - tensor_of(node).dim()
    found = {}
    for given in node.all_input_nodes:
        tensor = tensor_val(given)
        if tensor is not None and tensor.dim() >= -from_right and static_int(tensor.shape[from_right]) != 1:
            found[given] = AxisSplit(tensor.dim() + from_right, split.ranges)
    return found


def head_needs(node: Node, split: AxisSplit) -> Needs:
    """What works on each head, or each row, by itself: rope and norms."""
    if split.axis == tensor_of(node).dim() - 1:
        raise Refused(node, f"{where(node)} is {op_text(node)}, which needs whole rows of the axis that is split")
    return broadcast_needs(node, split)


def norm_needs(node: Node, split: AxisSplit) -> Needs:
    """A norm over all heads: sums of squares are added up over the ranks (writing.py)."""
    if split.axis == tensor_of(node).dim() - 1:
        return {node.args[0]: split, node.args[1]: AxisSplit(0, split.ranges)}
    return broadcast_needs(node, split)


def attention_needs(node: Node, split: AxisSplit) -> Needs:
    """The result is [b, s, heads, d]; queries, keys and values are [b, heads, s, d]."""
    given = options_of(node)
    if split.axis != 2:
        raise Refused(node, f"{where(node)}: attention is split by heads, not inside them")
    heads, kv_heads = (int(tensor_of(given[name]).shape[1]) for name in ("q", "k"))
    own = kv_share(heads, kv_heads, split.ranges, node)
    needs = {given["q"]: AxisSplit(1, split.ranges), given["k"]: AxisSplit(1, own), given["v"]: AxisSplit(1, own)}
    mask, sinks = given["mask"], given["sinks"]
    if mask is not None and static_int(tensor_of(mask).shape[1]) != 1:
        needs[mask] = AxisSplit(1, split.ranges)
    return needs | ({} if sinks is None else {sinks: AxisSplit(0, split.ranges)})


RULES: Mapping[object, Callable[[Node, AxisSplit], Needs]] = {
    **dict.fromkeys(RESHAPES, reshape_needs),
    **dict.fromkeys(COPIES, broadcast_needs),
    aten.transpose.int: transpose_needs,
    aten.permute.default: permute_needs,
    aten.unsqueeze.default: unsqueeze_needs,
    SLICE: slice_needs,
    EXPAND: broadcast_needs,
    aten.cat.default: cat_needs,
    aten.gelu.default: broadcast_needs,
    ops.swiglu.default: broadcast_needs,
    ops.rope.default: head_needs,
    RMS_NORM: head_needs,
    LAYER_NORM: head_needs,
    ATTENTION: attention_needs,
}


def needs_of(node: Node, split: AxisSplit, *, norms: bool = False) -> Needs | None:
    """What the part of a call's result is computed from; None where no rule says. norms: those over the axis that is
    split are split as well."""
    if norms and is_op(node, RMS_NORM):
        return norm_needs(node, split)
    rule = RULES.get(node.target) or (broadcast_needs if is_pointwise(node) and not is_random(node) else None)
    return None if rule is None else rule(node, split)
