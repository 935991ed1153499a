"""Connected pieces of a graph that could become one kernel: what works on rows, and what stands next to a GEMM."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import getitem
from typing import Literal

import torch
from torch.fx import Graph, GraphModule, Node

from graft.base.errors import ShapesUnknown
from graft.ir.edit import attribute
from graft.ir.effects import is_mutating
from graft.ir.nodes import is_op, is_weight, tensor_val, val, where
from graft.ir.subgraph import inputs_of, outputs_of
from graft.passes.regions import Grower
from graft.workbench.discover.calls import (
    LOOKUPS,
    SOFTMAX,
    first_tensor,
    is_attention,
    is_call,
    is_free,
    is_matmul,
    is_norm,
    node_inputs,
    readers,
    through_views,
    works_on_rows,
)
from graft.workbench.discover.seeds import FoundWalk, walked

Kind = Literal[
    "norm_chain",
    "elementwise_chain",
    "gemm_epilogue",
    "gemm_prologue",
    "horizontal_gemm",
    "attention_neighbour",
    "experts",
    "position_table",
]


@dataclass(frozen=True)
class CandidateRegion:
    """Nodes in graph order."""

    kind: Kind
    nodes: tuple[Node, ...]
    walk: FoundWalk | None = None  # the walk of the library that takes it

    def inputs(self) -> list[Node]:
        return inputs_of(self.nodes)

    def outputs(self) -> list[Node]:
        return outputs_of(self.nodes)

    def launches(self) -> int:
        return sum(not is_free(node) for node in self.nodes)


def find_pieces(gm: GraphModule) -> list[CandidateRegion]:
    """Everything that launches two kernels or more and could launch one; nothing is in two pieces."""
    graph = gm.graph
    check_shapes(graph)
    order = {node: index for index, node in enumerate(graph.nodes)}
    tables = position_nodes(gm)
    walks = walked(gm)
    apart = {*tables, *(fixed := computed_from_weights(graph)), *(node for walk in walks for node in walk.nodes)}
    rows = [node for node in graph.nodes if node not in apart and works_on_rows(node)]
    keys = {node: row_key(node) for node in rows if first_tensor(node) is not None}
    grown = [tuple(region.nodes) for region in Grower(graph, keys, "discover").grow()]
    joined = {node for nodes in grown for node in nodes}
    alone = [(node,) for node in keys if node not in joined and not is_free(node)]
    pieces = [CandidateRegion(walk.kind, walk.nodes, walk) for walk in walks]
    taken = {node for piece in pieces for node in piece.nodes}
    for found in (*grown, *alone):
        nodes = in_order(with_matmuls(trimmed(with_weights(found, fixed))), order)
        if sum(not is_free(node) for node in nodes) > 1 and not taken & set(nodes):
            taken |= set(nodes)
            pieces.append(CandidateRegion(kind_of(nodes), nodes))
    if sum(not is_free(node) for node in tables) > 1:
        pieces.append(CandidateRegion("position_table", in_order(tables, order)))
    return sorted(pieces, key=lambda piece: order[piece.nodes[0]])


def position_nodes(gm: GraphModule) -> list[Node]:
    """The calls that are computed in every step from whole-number inputs and buffers alone: cosines, sines, masks.
    Views at the end are left out, and sizes."""
    found: dict[Node, None] = {}
    for node in gm.graph.nodes:
        if is_call(node) and not is_mutating(node) and tensor_val(node) is not None:
            sources = [a for a in node.all_input_nodes if tensor_val(a) is not None]
            if sources and all(a in found or is_position_source(gm, a) for a in sources):
                found[node] = None
    return [node for node in trimmed(list(found)) if not is_op(node, *LOOKUPS)]


def is_position_source(gm: GraphModule, node: Node) -> bool:
    if node.op == "get_attr":
        return not isinstance(attribute(gm, str(node.target)), torch.nn.Parameter)
    value = tensor_val(node)
    whole = value is not None and not value.is_floating_point() and not value.is_complex()
    return node.op == "placeholder" and whole and not node.meta.get("weight")


def check_shapes(graph: Graph) -> None:
    unknown = next((n for n in graph.nodes if is_call(n) and val(n) is None and returns_tensors(n)), None)
    if unknown is not None:
        raise ShapesUnknown(where(unknown))


def returns_tensors(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any("Tensor" in str(result.type) for result in schema.returns)


def row_key(node: Node) -> tuple[object, ...]:
    made = first_tensor(node)
    assert made is not None
    return (*(str(size) for size in made.shape[:-1]), made.device)


def in_order(nodes: Iterable[Node], order: dict[Node, int]) -> tuple[Node, ...]:
    return tuple(sorted(dict.fromkeys(nodes), key=order.__getitem__))


def computed_from_weights(graph: Graph) -> set[Node]:
    """Calls whose inputs are weights, or computed from weights alone: `1 + weight`."""
    found: set[Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if is_call(node) and sources and all(a in found or is_weight(a) for a in sources):
            found.add(node)
    return found


def with_weights(nodes: tuple[Node, ...], fixed: set[Node]) -> list[Node]:
    """Also what is computed from weights for this piece alone."""
    found = dict.fromkeys(nodes)
    queue = list(found)
    for node in queue:
        for source in node.all_input_nodes:
            if source in fixed and source not in found and all(user in found for user in source.users):
                found[source] = None
                queue.append(source)
    return queue


def trimmed(nodes: list[Node]) -> list[Node]:
    """Without views at its end, which are what reads it; the items of a tuple are its results."""
    kept = dict.fromkeys(nodes)
    changed = True
    while changed:
        last = [n for n in kept if is_free(n) and not any(user in kept for user in n.users)]
        loose = [n for n in last if not (is_op(n, getitem) and n.args[0] in kept)]
        changed = bool(loose)
        for node in loose:
            del kept[node]
    return list(kept)


def with_matmuls(nodes: list[Node]) -> list[Node]:
    """A softmax takes the GEMMs on both sides with it, a single call the one GEMM next to it."""
    inside = set(nodes)
    softmax = next((node for node in nodes if is_op(node, *SOFTMAX)), None)
    if softmax is not None:
        before = [path for node in nodes for path in paths_from_matmul(node, inside)]
        after = next((n for n in readers(nodes[-1]) if is_matmul(n)), None) if nodes else None
        if before and after is not None:
            return [*nodes, *before[0], *between(nodes[-1], after), after]
    if sum(not is_free(node) for node in nodes) != 1:
        return nodes
    (call,) = (node for node in nodes if not is_free(node))
    for source in map(through_views, node_inputs(call)):
        if is_matmul(source) and readers(source) == [call]:
            return [source, *(view for node in nodes for view in views_above(node, source)), *nodes]
    read = readers(call)
    if len(read) != 1 or not (is_matmul(read[0]) or is_attention(read[0])):
        return nodes
    if is_matmul(read[0]):
        return [*nodes, *between(call, read[0]), read[0]]
    # queries and keys are rotated by one kernel or by none
    rotated = [source for source in map(through_views, node_inputs(read[0])) if is_op(source, call.target)]
    return [*(part for one in rotated for part in (one, *between(one, read[0]))), read[0]]


def paths_from_matmul(node: Node, inside: set[Node]) -> list[list[Node]]:
    """From each GEMM that feeds `node` through views: the GEMM and those views."""
    found = []
    for source in node.all_input_nodes:
        if source not in inside and is_matmul(through_views(source)):
            path = [source]
            while not is_matmul(path[-1]):
                path.append(path[-1].all_input_nodes[0])
            found.append(path)
    return found


def views_above(node: Node, source: Node) -> list[Node]:
    """The views of `source` that `node` reads it through."""
    found: list[Node] = []
    for given in node_inputs(node):
        while given is not source and is_call(given) and is_free(given) and through_views(given) is source:
            found.append(given)
            given = node_inputs(given)[0]
    return found


def between(call: Node, reader: Node) -> list[Node]:
    """The views through which `reader` reads `call`."""
    for user in call.users:
        if user is reader:
            return []
        if is_call(user) and is_free(user) and reader in readers(user):
            return [user, *between(user, reader)]
    return []


def kind_of(nodes: tuple[Node, ...]) -> Kind:
    inside = set(nodes)
    calls = [node for node in nodes if not is_free(node)]
    if any(is_op(n, *SOFTMAX) or is_attention(n) for n in calls):
        return "attention_neighbour"
    if any(is_matmul(node) for node in calls):
        return "gemm_epilogue" if is_matmul(calls[0]) else "gemm_prologue"
    if any(is_norm(node) for node in calls):
        return "norm_chain"
    read = [reader for node in nodes for reader in readers(node) if reader not in inside]
    sources = [through_views(a) for n in nodes for a in n.all_input_nodes if a not in inside and not is_weight(a)]
    if any(map(is_attention, (*read, *sources))):
        return "attention_neighbour"
    if any(is_matmul(source) for source in sources):
        return "gemm_epilogue"
    return "gemm_prologue" if read and all(is_matmul(reader) for reader in read) else "elementwise_chain"
