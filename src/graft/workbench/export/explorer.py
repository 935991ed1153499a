"""Graphs for Model Explorer: one collection of graphs, modules as namespaces that open and close."""

from __future__ import annotations

import re
from collections.abc import Iterable
from operator import getitem
from typing import Any

from torch.fx import GraphModule, Node

from graft.ir.io.text import target_text
from graft.ir.nodes import arg_values, is_op, leaves, module_path, source_line
from graft.workbench.discover.values import TENSOR, split

LABELS = {"placeholder": "input", "output": "output", "get_attr": "weight"}


def collection(name: str, graphs: Iterable[tuple[str, GraphModule]]) -> dict[str, Any]:
    """What Model Explorer opens as a .json file."""
    return {"label": name, "graphs": [{"id": title, "nodes": nodes_of(gm)} for title, gm in graphs]}


def nodes_of(gm: GraphModule) -> list[dict[str, Any]]:
    """In the order of the graph: every edge comes from a node above."""
    return [node_entry(node) for node in gm.graph.nodes]


def node_entry(node: Node) -> dict[str, Any]:
    return {
        "id": node.name,
        "label": LABELS.get(node.op) or target_text(node.target),
        "namespace": namespace(node),
        "attrs": [{"key": key, "value": value} for key, value in attributes(node).items() if value],
        "incomingEdges": [
            {"sourceNodeId": source.name, "sourceNodeOutputId": item_of(node), "targetNodeInputId": str(index)}
            for index, source in enumerate(sources(node))
        ],
        "outputsMetadata": [
            {"id": str(index), "attrs": [{"key": key, "value": text} for key, text in parts.items()]}
            for index, parts in enumerate(output_parts(node))
        ],
    }


def item_of(node: Node) -> str:
    """Which result of its source a node reads: an item of a tuple, or the only one."""
    return str(node.args[1]) if is_op(node, getitem) else "0"


def namespace(node: Node) -> str:
    """`model.layers.3.mlp` → model/layers/3/mlp; weights beside the calls that read them."""
    reader = next(iter(node.users), None) if node.op == "get_attr" else node
    path = module_path(reader) if reader is not None else ""
    return "/".join(part for part in re.split(r"[.\[\]]+", path) if part)


def sources(node: Node) -> list[Node]:
    """In the order of the arguments, one for each position."""
    return [leaf for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, Node)]


def attributes(node: Node) -> dict[str, str]:
    literals = {}
    if node.op == "call_function" and hasattr(node.target, "_schema"):
        given = [(a.name, v) for a, v in arg_values(node) if not any(isinstance(x, Node) for x in leaves(v))]
        literals = {name: str(value) for name, value in given if value is not None}
    return {
        **literals,
        "weight": str(node.target) if node.op == "get_attr" else "",
        "source": source_line(node),
        "made_by": str(node.meta.get("made_by") or ""),
    }


def output_parts(node: Node) -> list[dict[str, str]]:
    """Shape and dtype of each result, from the text that a dump keeps of them."""
    text = str(node.meta.get("value_text") or "")
    if not text or node.op == "output":
        return []
    several = text.startswith("(") and "[" in text
    return [tensor_parts(part) for part in (split(text[1:-1]) if several else [text])]


def tensor_parts(text: str) -> dict[str, str]:
    found = TENSOR.fullmatch(text)
    if found is None:
        return {"value": text}
    return {"shape": " x ".join(split(found[2])) or "scalar", "dtype": found[1]}
