"""The stream ops of a graph (`ops/streams.py`), and which of its calls run on the device at all."""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem
from typing import Literal

import torch
from torch.fx import Graph, Node

from graft.ir.effects import alias_sources, is_maybe_view, is_mutating, with_views
from graft.ir.nodes import OpOverload, is_op

StreamOp = Literal["switch", "record", "wait", "keep"]
PREFIX = "graft::stream_"
aten = torch.ops.aten
# answered on the host from sizes and strides
SIZES = (
    aten.sym_size.int,
    aten.sym_stride.int,
    aten.sym_numel.default,
    aten.sym_storage_offset.default,
    aten._assert_tensor_metadata.default,
)


def stream_op(node: Node) -> tuple[StreamOp, int] | None:
    """`("wait", 3)` for graft.stream_wait(3); the number of a `keep` says nothing."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    name = node.target._schema.name
    if not name.startswith(PREFIX):
        return None
    kind: StreamOp = name.removeprefix(PREFIX)  # pyrefly: ignore[bad-assignment]
    number = node.args[0]
    return kind, number if isinstance(number, int) else 0


def has_streams(graph: Graph) -> bool:
    return any(stream_op(node) for node in graph.nodes)


def drop_streams(graph: Graph) -> None:
    """One stream again: the order of the graph is right without them."""
    for node in [node for node in graph.nodes if stream_op(node)]:
        graph.erase_node(node)


def on_device(node: Node) -> bool:
    """Whether a call puts work on a stream. Views, items of tuples and computations with sizes do not."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if stream_op(node) or is_op(node, *SIZES):
        return False
    return is_mutating(node) or is_maybe_view(node) or not alias_sources(node)


def producers(value: Node) -> Iterator[Node]:
    """The calls on the device whose results `value` is, or is a view of, or is computed from on the host."""
    waiting, seen = [value], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if on_device(node):
            yield node
        elif not is_op(node, *SIZES):
            waiting += node.all_input_nodes


def sources(node: Node) -> set[Node]:
    """The calls on the device whose results `node` takes."""
    return {producer for value in node.all_input_nodes for producer in producers(value)}


def in_memory_of(node: Node) -> list[Node]:
    """A call and all that may lie in the memory that it allocated."""
    return with_views([node, *(user for user in node.users if user.target is getitem)])
