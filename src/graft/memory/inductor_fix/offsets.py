"""Where the views through which ops write start, in the memory that their base has now.

    before:  %off = aten.sym_storage_offset(%select)             after:  %off = start_of(%select)
             auto_functionalized_v2(op, _x_storage_offset=%off,          %at = offset_of(%off, %then, %base)
                                    _all_bases=[%then])                  op(aten.as_strided(%base, …, %at))

`start_of` and `offset_of` (functionalization.py) are numbers, in eager and in what Inductor generates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from graft.ir.effects import storage_root
from graft.ir.nodes import static_int, tensor_of, val
from graft.memory.inductor_fix.moves import insert
from graft.memory.inductor_fix.work import GraphWork, View
from graft.memory.regions import region_of

aten = torch.ops.aten
# on a node that is an offset: where the graph input starts that it is in. torch 2.11 counts offsets from there
IN_INPUT = "graft_in_input"
OffsetOf = Callable[..., Any]


def view_arguments(offset_of: OffsetOf, view: View, then: Node, base: Node, before: Node) -> tuple[Any, ...]:
    """The arguments of `view` on `base`. `then` is the base of the functional call, whose views they described."""
    numbers = view.numbers(tensor_of(base))
    if view.target is aten.as_strided.default:
        size, stride, offset = view.args
        known = static_int(view.origin)
        origin = then if known is None else known
        return size, stride, offset_node(offset_of, (offset, origin, base), numbers[2], base, before)
    if view.target is aten.slice.Tensor and static_int(view.origin) != 0:
        dim, *ends = view.args
        parts = zip(ends, numbers[1:], strict=True)
        return dim, *(number_node(offset_of, (end, then, 0, dim), value, before) for end, value in parts)
    return view.args


def offset_node(offset_of: OffsetOf, args: tuple[Any, ...], value: Any, base: Node, before: Node) -> Any:
    """`offset_of(*args)` as an offset into the storage of `base`."""
    root = storage_root(base)
    start = tensor_of(root).storage_offset() if root.op == "placeholder" else 0
    return number_node(offset_of, args, value, before, start)


def number_node(offset_of: OffsetOf, args: tuple[Any, ...], value: Any, before: Node, in_input: Any = 0) -> Any:
    """`offset_of(*args)`, whose value is known to be `value`: a literal, the node that it is already, or a new
    one."""
    if static_int(in_input) == 0:
        if static_int(value) is not None:
            return static_int(value)
        if str(value) == str(val(args[0])):
            return args[0]
    with before.graph.inserting_before(before):
        node = before.graph.call_function(offset_of, args)
    node.meta["val"], node.meta[IN_INPUT] = value, in_input
    return node


def copied_stretch(work: GraphWork, value: Node, before: Node) -> Node | None:
    """A copy of a value with gaps, with its strides: the stretch of storage that it covers, and the view of that."""
    tensor, region = tensor_of(value), region_of(tensor_of(value))
    if region is None:
        return None
    graph, size = work.graph, region.end - region.offset
    start = offset_node(work.offset_of, (region.offset, region.offset, value), region.offset, value, before)
    layouts = ([size], [1], start), (list(tensor.shape), list(tensor.stride()), 0)
    flat = insert(graph, aten.as_strided.default, (value, *layouts[0]), before=before, like=value)
    copied = insert(graph, aten.clone.default, (flat,), before=before, like=value)
    shaped = insert(graph, aten.as_strided.default, (copied, *layouts[1]), before=before, like=value)
    for node in (flat, copied, shaped):
        work.aliases.add(node)
    return shaped
