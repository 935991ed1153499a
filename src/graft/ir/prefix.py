"""A graph that was captured inside a wrapper, under the names that it has without it."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from graft.ir.edit import attach_state
from graft.ir.verify import module_state


def drop_prefix(gm: GraphModule, prefix: str, codegen: torch.fx.graph.CodeGen, class_name: str) -> GraphModule:
    """`decoder.model.layers.0…` becomes `model.layers.0…`, in targets, node names and module stacks."""
    root = torch.nn.Module()
    persistent = set(gm.state_dict())
    for name, tensor in module_state(gm).items():
        attach_state(root, name.removeprefix(f"{prefix}."), tensor, persistent=name in persistent)
    graph, copies = Graph(), {}
    for node in gm.graph.nodes:
        attribute = node.op == "get_attr"
        copies[node] = graph.create_node(
            node.op,
            str(node.target).removeprefix(f"{prefix}.") if attribute else node.target,
            map_arg(node.args, copies.__getitem__),
            map_arg(node.kwargs, copies.__getitem__),
            name=node.name.removeprefix(f"{prefix}_") if attribute else node.name,
        )
        copies[node].meta = {**node.meta, **plain_stack(node, prefix)}
    graph.set_codegen(codegen)
    return GraphModule(root, graph, class_name=class_name)


def plain_stack(node: Node, prefix: str) -> dict[str, dict[str, tuple[str, str]]]:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return {}
    return {"nn_module_stack": {k: (path.removeprefix(prefix).lstrip("."), cls) for k, (path, cls) in stack.items()}}
