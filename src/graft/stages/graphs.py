"""Graphs of torch.fx as records of a story."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from torch.fx import Graph, Node

from graft.ir.branches import all_nodes, graphs_of
from graft.ir.io.text import abstract_text, graph_text, target_text, type_text
from graft.ir.nodes import FRAME, TORCH, module_path, source_line, static_int, tensor_val
from graft.stages.origins import inner_name
from graft.stages.story import StageGraph, StageNode

ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object, in its repr
SELF = re.compile(r"^(L\['self'\]\.?|L\['(\w+)'\])")  # Dynamo's name of the module that is compiled


def record_graph(graph: Graph, number: str, frame: str = "") -> StageGraph:
    """With the nodes of branches and loop bodies, by names that have theirs in front."""
    nodes = [record_node(node, path) for path, part in graphs_of(graph) for node in part.nodes]
    return StageGraph(number, frame, tuple(nodes), graph_text(graph))


def with_callers(recorded: StageGraph, graph: Graph) -> StageGraph:
    """The whole way from the program to each line, as Dynamo's graph has it; later graphs know the innermost line."""
    pairs = zip(recorded.nodes, all_nodes(graph), strict=True)
    return replace(recorded, nodes=tuple(replace(one, callers=callers_of(node)) for one, node in pairs))


def callers_of(node: Node) -> tuple[str, ...]:
    outside = [frame for frame in FRAME.findall(node.meta.get("stack_trace") or "") if not frame[0].startswith(TORCH)]
    return tuple(dict.fromkeys(f"{path.rsplit('/', 1)[-1]}:{line}" for path, line, _ in outside[:-1]))


def record_node(node: Node, path: str = "") -> StageNode:
    """path: of the graph inside of which it is. Its nodes are followed by their lines: what they were made from goes
    by a name that is given to others outside, too."""
    original = node.meta.get("original_aten")
    return StageNode(
        inner_name(path, node.name),
        node.op if node.op in ("placeholder", "get_attr", "output") else target_text(node.target),
        type_text(node).removeprefix(" : ") or example_text(node),
        source_line(node),
        SELF.sub(r"\2", module_path(node)),
        () if path else sources_of(node),
        target_text(original) if original is not None and original != node.target else "",
        args=arguments_text(node, path),
    )


def arguments_text(node: Node, path: str) -> str:
    """As `graph_text` has them, by the names of this story."""

    def named(value: Any) -> str:
        if isinstance(value, Node):
            return f"%{inner_name(path, value.name)}"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(named, value))}]"
        return ADDRESS.sub("", str(value))

    return ", ".join([*map(named, node.args), *(f"{key}={named(value)}" for key, value in node.kwargs.items())])


def example_text(node: Node) -> str:
    """Dynamo keeps values under another name."""
    value = node.meta.get("example_value")
    return "" if value is None else abstract_text(value)


def sources_of(node: Node) -> tuple[str, ...]:
    """The names that the node had in Dynamo's graph: the ends of the chain that torch keeps in `from_node`."""
    found: list[str] = []

    def walk(sources: Any) -> None:
        for source in sources or ():
            inner = getattr(source, "from_node", None)
            if inner:
                walk(inner)
            elif getattr(source, "name", None):
                found.append(source.name)

    walk(node.meta.get("from_node"))
    return tuple(dict.fromkeys(found))


def code_lines(graph: Graph) -> dict[str, str]:
    """The code at each line that made a node, as the trace holds it."""
    found: dict[str, str] = {}
    for trace in {node.meta.get("stack_trace") or "" for node in all_nodes(graph)}:
        outside = [frame for frame in FRAME.findall(trace) if not frame[0].startswith(TORCH)]
        if outside and outside[-1][2]:
            path, line, text = outside[-1]
            found[f"{path.rsplit('/', 1)[-1]}:{line}"] = text.strip()
    return found


def tensor_bytes(node: Any) -> int | str:
    """Of the recorded value; an expression where sizes are symbols."""
    tensor = tensor_val(node)
    if tensor is None:
        return 0
    size = tensor.numel() * tensor.itemsize
    number = static_int(size)
    return number if number is not None else str(size)
