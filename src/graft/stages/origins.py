"""Which nodes of the graph a node of Inductor's IR computes.

Its origins have more: what is made while a call is lowered (its arguments, computed for it) has the call among them,
a call has its arguments, and a branch what is around it.
"""

from __future__ import annotations

from typing import Any

import torch._inductor.ir
from torch.fx import Node

NEEDS = (
    "torch._inductor.ir:ExternKernel",
    "torch._inductor.ir:Operation.get_origins",
    "torch._inductor.virtualized:V",
)


def computed_nodes(inner: Any) -> tuple[str, ...]:
    """Names as `record_graph` has them, in the order of the graph."""
    if inner is None:
        return ()
    if isinstance(inner, torch._inductor.ir.ExternKernel):
        called = called_node(inner)
        return (node_name(called),) if called is not None else ()
    here = of_this_graph(inner.get_origins())
    calls = {id(one) for one in called_nodes()}
    return tuple(node_name(one) for one in here if id(one) not in calls)


def called_node(kernel: Any) -> Node | None:
    """The node that a call is made for: its own, or the last of its origins, which are it and its arguments."""
    own = getattr(kernel, "origin_node", None)
    here = of_this_graph(kernel.get_origins())
    return own if own is not None else here[-1] if here else None


def called_nodes() -> list[Node]:
    from torch._inductor.virtualized import V

    kernels = [one for one in V.graph.operations if isinstance(one, torch._inductor.ir.ExternKernel)]
    return [node for node in map(called_node, kernels) if node is not None]


def of_this_graph(origins: Any) -> list[Node]:
    """Those of the graph that is being lowered, in its order."""
    from torch._inductor.virtualized import V

    order = node_order(V.graph)
    return sorted((one for one in origins if one in order), key=order.__getitem__)


def node_order(lowering: Any) -> dict[Node, int]:
    kept = getattr(lowering, "_graft_node_order", None)
    if kept is None:
        kept = {node: index for index, node in enumerate(lowering.module.graph.nodes)}
        lowering._graft_node_order = kept
    return kept


def node_name(node: Node) -> str:
    """With the name of the branch that it is in: `true_graph_0_mul`."""
    from torch._inductor.virtualized import V

    return inner_name(V.graph.name or "", node.name)


def inner_name(path: str, name: str) -> str:
    path = path.replace(".", "_")
    return f"{path}_{name}" if path and not name.startswith(f"{path}_") else name
