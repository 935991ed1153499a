"""What the calls of a graph do to memory: whose memory a result may be in, and what is written. Read off the schemas,
and off a table for the ops whose schemas are silent.

The facts about one node are here, where everything that reads a graph can ask them; `graft.memory` builds the
analysis of a whole graph on them (groups of nodes, regions, order).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter, getitem
from typing import Any

import torch
from torch.fx import Graph, Node

from graft.ir.nodes import OpOverload, is_op, leaves
from graft.ir.storage import storage_id

DETACH = torch.ops.aten.detach_.default  # in place by its schema, but it changes no value

# may return an input, or a view of it, although their schemas do not say so, or not in every case
MAYBE_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        *("reshape", "contiguous", "to", "flatten", "ravel", "type_as", "lift", "sum_to_size", "conj_physical"),
        *("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
        *("atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "meshgrid", "cartesian_prod", "einsum"),
        *("_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"),
    )
)

HOLDS = frozenset({"graft::stream_keep"})  # take tensors so that their memory stays theirs, and read nothing

RUNNING = ("running_mean", "running_var")
# write arguments although their schemas do not say so: what they write, and the flag without which they do not
UNDECLARED_WRITES: dict[str, tuple[tuple[str, ...], str | None]] = {
    "aten::batch_norm": (RUNNING, "training"),
    "aten::instance_norm": (RUNNING, "use_input_stats"),
    "aten::native_batch_norm": (RUNNING, "training"),
    "aten::cudnn_batch_norm": (RUNNING, "training"),
    "aten::miopen_batch_norm": (RUNNING, "training"),
    "aten::_batch_norm_impl_index": (RUNNING, "training"),
    "aten::batch_norm_update_stats": (RUNNING, None),
    "aten::batch_norm_gather_stats": (RUNNING, None),
    "aten::batch_norm_gather_stats_with_counts": (RUNNING, None),
}


@dataclass(frozen=True)
class ArgumentPosition:
    """Where a schema argument stands in a call; `index` is None where it goes by name alone."""

    index: int | None
    name: str

    def of(self, node: Node) -> Any:
        if self.index is not None and self.index < len(node.args):
            return node.args[self.index]
        return node.kwargs.get(self.name)


@dataclass(frozen=True)
class Effects:
    """What an op does to memory: the arguments it writes, and for each result those whose memory it may be in.

    undeclared: written beside those, in calls where `flag` is not False (in all of them where there is no flag).
    No op of ATen gives a result that may be in one of several arguments (a test holds that).
    """

    written: tuple[ArgumentPosition, ...] = ()
    results: tuple[tuple[ArgumentPosition, ...], ...] = ()
    maybe_view: bool = False
    undeclared: tuple[ArgumentPosition, ...] = ()
    flag: ArgumentPosition | None = None

    def written_by(self, node: Node) -> tuple[ArgumentPosition, ...]:
        off = not self.undeclared or (self.flag is not None and self.flag.of(node) is False)
        return self.written if off else self.written + self.undeclared


@cache
def effects(target: Any) -> Effects:
    """Of an op overload, from its schema and `UNDECLARED_WRITES`; a plain function has none."""
    schema = target._schema if isinstance(target, OpOverload) else None
    if schema is None:
        returned = (ArgumentPosition(0, ""),) if getattr(target, "returns_argument", False) else ()
        return Effects(results=(returned,))
    positions = [(a, ArgumentPosition(None if a.kwarg_only else i, a.name)) for i, a in enumerate(schema.arguments)]
    aliased = [(a.alias_info, position) for a, position in positions if a.alias_info is not None]
    written = tuple(position for info, position in aliased if info.is_write and target is not DETACH)
    maybe = schema.name in MAYBE_VIEWS
    results = []
    for result in schema.returns:
        names = result.alias_info.before_set if result.alias_info else set()
        # a list of views (`split(Tensor(a -> *)) -> Tensor(a)[]`) carries no alias info of its own
        found = tuple(position for info, position in aliased if info.before_set & names or not schema.is_mutable)
        if maybe and not found:  # the first tensor, or list of tensors
            found = tuple(position for a, position in positions if "Tensor" in str(a.type))[:1]
        results.append(found)
    silent, flag = UNDECLARED_WRITES.get(schema.name, ((), None))
    undeclared = tuple(position for _, position in positions if position.name in silent)
    return Effects(
        written, tuple(results), maybe, undeclared, next((p for _, p in positions if p.name == flag), None)
    )


def mutated_args(node: Node) -> list[Node]:
    """The argument nodes that this call writes to."""
    if node.op != "call_function":
        return []
    return [
        leaf
        for position in effects(node.target).written_by(node)
        for leaf in leaves(position.of(node))
        if isinstance(leaf, Node)
    ]


def written_args(graph: Graph) -> list[tuple[Node, Node]]:
    """(call, what it writes) for every call that writes, in order; 0.3 µs for a node that does not."""
    return [(node, argument) for node in graph.nodes if is_mutating(node) for argument in mutated_args(node)]


def is_mutating(node: Node) -> bool:
    """By its schema; `mutated_args` says what it writes, which for `detach_` is nothing."""
    if not isinstance(node.target, OpOverload):
        return False
    if node.target._schema.is_mutable:
        return True
    return node.target._schema.name in UNDECLARED_WRITES and bool(mutated_args(node))


def is_hold(node: Node) -> bool:
    """Takes tensors only to keep their memory."""
    return isinstance(node.target, OpOverload) and node.target._schema.name in HOLDS


def is_maybe_view(node: Node) -> bool:
    """Returns its input or a copy of it, as sizes and strides allow."""
    return node.op == "call_function" and effects(node.target).maybe_view


def alias_sources(node: Node) -> list[Node]:
    """The arguments whose memory the result may be in. Of a tuple of several results, ask the items."""
    if node.op != "call_function":
        return []
    if is_op(node, getitem):
        call, item = node.args[:2]
        return item_sources(call, item) if isinstance(call, Node) and isinstance(item, int) else []
    results = effects(node.target).results
    found = [position.of(node) for position in results[0]] if len(results) == 1 else []
    # one tensor made of a list of several (einsum) is computed; of a list of one it may be a view
    return nodes_in([value for value in found if not isinstance(value, (list, tuple)) or len(value) == 1])


def item_sources(call: Node, item: int) -> list[Node]:
    """The same for one result of several, or one item of a list."""
    results = effects(call.target).results if call.op == "call_function" else ()
    if len(results) > 1:
        return nodes_in([position.of(call) for position in results[item]])
    found = [position.of(call) for position in results[0]] if results else []
    # views of a list (broadcast_tensors) are one of each
    return nodes_in([value[item] if isinstance(value, (list, tuple)) else value for value in found])


def nodes_in(value: Any) -> list[Node]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Node)]


def storage_root(node: Node) -> Node:
    """Follows views upward to the node that owns the storage."""
    while sources := alias_sources(node):
        node = sources[0]
    return node


def written_value(node: Node) -> Node:
    """What an in-place call returns is its argument, in the same layout; any other node is itself."""
    while is_mutating(node) and torch.Tag.inplace_view not in node.target.tags and (sources := alias_sources(node)):
        node = sources[0]
    return node


def mutated_roots(graph: Graph) -> set[Node]:
    """Storage owners that some node of the graph writes to, and attributes that share memory with one of them."""
    written = {storage_root(arg) for node in graph.nodes for arg in mutated_args(node)}
    owners = [node for node in written if node.op == "get_attr"]
    if owners and graph.owning_module is not None:
        memory = {address(graph, node) for node in owners}
        written |= {node for node in graph.nodes if node.op == "get_attr" and address(graph, node) in memory}
    return written


def with_views(nodes: Iterable[Node]) -> list[Node]:
    """The nodes and everything that may be a view of them, sources first."""
    found = dict.fromkeys(nodes)
    queue = list(found)
    for node in queue:
        # of a call with several results, the items are views, whatever it is itself
        items = (item for user in node.users for item in user.users if item.target is getitem)
        views = [user for user in (*node.users, *items) if user not in found and node in alias_sources(user)]
        queue += dict.fromkeys(views)
        found |= dict.fromkeys(views)
    return queue


def writers(root: Node) -> list[Node]:
    """Every node that writes to a storage."""
    found = (user for alias in with_views([root]) for user in alias.users if alias in mutated_args(user))
    return list(dict.fromkeys(found))


def address(graph: Graph, node: Node) -> int:
    """What two attributes that share memory have in common."""
    tensor = attrgetter(str(node.target))(graph.owning_module)
    storage = storage_id(tensor) if isinstance(tensor, torch.Tensor) else None
    return -id(tensor) if storage is None else storage
