"""Checks in a graph: those that capture has proven go, those that the data of a call decides are the program's own.

before:  %k = aten.item(%n); %lt = operator.lt(%k, 10); aten._assert_scalar(%lt, "…")      after:  the same
         %s = aten.sym_size.int(%x, 0); %ge = operator.ge(%s, 2); aten._assert_scalar(%ge)         (gone)
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from graft.ir.nodes import OpOverload, is_op, leaves, tensor_val

aten = torch.ops.aten
SCALAR = aten._assert_scalar.default
METADATA = aten._assert_tensor_metadata.default  # restates what capture recorded
RANGES = (aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default)  # also there as `ge` and `le`
ASYNC = (aten._assert_async.default, aten._assert_async.msg)
CHECKS = frozenset((METADATA, SCALAR, *RANGES, *ASYNC))
SHAPES = (aten.slice.Tensor, aten.sym_size.int)  # read sizes and bounds; data where a bound is read off it
# A number that was checked to be a constant has neither a symbol nor `unbacked_bindings`; the tags still tell.
READS_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def is_check(node: Node) -> bool:
    return is_op(node, *CHECKS)


def check_between(first: Node, last: Node) -> Node | None:
    """A check that comes after `first` and before `last`: a write at `last` may not move to `first` past it."""
    node = first
    while (node := node.next) is not last:
        if is_check(node):
            return node
    return None


def drop_proven_checks(graph: Graph) -> None:
    """Erases what capture has proven: metadata, sizes of inputs, export's own guards. What data decides stays."""
    by_data = decided_by_data(graph)
    for node in reversed(list(graph.nodes)):
        guard_call = node.op == "call_module" and str(node.target).split(".")[-1].startswith("_guards_fn")
        proven = is_op(node, METADATA, *RANGES) or (is_op(node, SCALAR) and node not in by_data)
        if not node.users and (proven or guard_call):
            graph.erase_node(node)


def drop_restated_metadata(graph: Graph) -> None:
    """Erases the checks that restate dtype, device and layout of a value; all others stay."""
    for node in [node for node in graph.nodes if is_op(node, METADATA) and not node.users]:
        graph.erase_node(node)


def decided_by_data(graph: Graph) -> set[Node]:
    """Calls that read a number or a size off the values of a tensor, and all that is computed from them."""
    found: set[Node] = set()
    for node in graph.nodes:
        if reads_data(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def reads_data(node: Node) -> bool:
    if is_op(node, *SHAPES):  # torch 2.11 gives a slice of a dynamic size a size of its own, as if data decided it
        return False
    tags = node.target.tags if isinstance(node.target, OpOverload) else ()
    return bool(node.meta.get("unbacked_bindings")) or any(tag in tags for tag in READS_DATA)


def checked_numbers(graph: Graph) -> set[Node]:
    """The numbers that checks are computed from, back to the tensors that they are read off.

    Two of them may be equal because a check says so (`a.item() == b.item()`): made one, the check would say nothing.
    """
    queue = [node for check in graph.nodes if is_op(check, SCALAR) for node in check.all_input_nodes]
    found: dict[Node, None] = {}
    while queue:
        node = queue.pop()
        if node not in found and node.op == "call_function" and tensor_val(node) is None:
            found[node] = None
            queue += [leaf for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, Node)]
    return set(found)
