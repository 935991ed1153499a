"""Graphs inside of a graph: what torch.cond, while_loop, scan and map call.

    %true_graph_0 = self.true_graph_0
    %cond = higher_order.cond(%gt, %true_graph_0, %false_graph_0, [%x, %w])

Their nodes are named after them (`true_graph_0_mul`), so that a name means one node in the whole program.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph, GraphModule, Node

from graft.ir.edit import attribute
from graft.ir.effects import mutated_roots
from graft.ir.nodes import leaves, placeholders, where

# ops whose graphs are plain programs; those of flex_attention and associative_scan become parts of one kernel
CONTROL_FLOW = ("cond", "while_loop", "scan", "map_impl", "invoke_subgraph")


def is_control_flow(node: Node) -> bool:
    target = node.target
    return getattr(target, "namespace", "") == "higher_order" and getattr(target, "__name__", "") in CONTROL_FLOW


def inner_graphs(gm: GraphModule, prefix: str = "") -> dict[str, GraphModule]:
    """The graphs that control flow calls, by their paths from `gm`, each before what it holds itself."""
    found: dict[str, GraphModule] = {}
    for node in gm.graph.nodes:
        if node.op != "get_attr" or not any(map(is_control_flow, node.users)):
            continue
        inner = attribute(gm, str(node.target))
        if isinstance(inner, GraphModule):
            path = f"{prefix}{node.target}"
            found |= {path: inner} | inner_graphs(inner, f"{path}.")
    return found


def graphs_of(graph: Graph) -> Iterator[tuple[str, Graph]]:
    """The graph itself, under an empty path, and those inside of it."""
    yield "", graph
    if isinstance(graph.owning_module, GraphModule):
        yield from ((path, inner.graph) for path, inner in inner_graphs(graph.owning_module).items())


def all_nodes(graph: Graph) -> Iterator[Node]:
    """Of the graph and of those inside of it."""
    return (node for _, part in graphs_of(graph) for node in part.nodes)


def write_inside(gm: GraphModule) -> str | None:
    """Which call of an inner graph writes to what the graph around it owns, or None. Control flow has no schema that
    says so: reads around it would be merged, and it would be dropped where nobody wants its result."""
    for path, inner in inner_graphs(gm).items():
        for root in mutated_roots(inner.graph):
            if root.op in ("placeholder", "get_attr"):
                return f"{path} writes to {root.name} ({where(root)}), which lives outside of that branch or body"
    return None


def name_nodes(path: str, graph: Graph) -> dict[str, str]:
    """Names nodes that have other names after the path of their graph; old names, with the new ones."""
    start, renamed = f"{path.replace('.', '_')}_", {}
    for node in graph.nodes:
        if not node.name.startswith(start):
            old = node.name
            node._rename(f"{start}{old}")
            renamed[old] = node.name
            if node.op == "placeholder":
                node.target = node.name
    return renamed


def passed_on(call: Node) -> list[Node]:
    """What a control-flow call hands to its graphs as it is, for their last inputs; not what varies by step."""
    name = getattr(call.target, "__name__", "")
    given = call.args[2:] if name == "invoke_subgraph" else call.args[-1]
    return [value for value in leaves(given) if isinstance(value, Node)]


def mark_weights(gm: GraphModule) -> None:
    """Inputs of inner graphs that are parameters or buffers outside are marked, as torch.compile's weights are."""
    for call in filter(is_control_flow, gm.graph.nodes):
        given = passed_on(call)
        for node in call.all_input_nodes:
            inner = attribute(gm, str(node.target)) if node.op == "get_attr" else None
            if isinstance(inner, GraphModule) and given:
                for placeholder, value in zip(placeholders(inner.graph)[-len(given) :], given, strict=False):
                    if value.op == "get_attr" or value.meta.get("weight"):
                        placeholder.meta["weight"] = True
                mark_weights(inner)
