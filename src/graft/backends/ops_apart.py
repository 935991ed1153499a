"""graft's ops in Inductor's graph, taken apart into the ops of their references: for a process without Python.

    %y = graft.rms_norm(%x, %w, 1e-06)   ──▶   pow, mean, add, rsqrt, mul, mul

graft registers its ops in Python, so a package of AOTInductor that calls one has no schema for it in a C++ process.
Of what is taken apart Inductor makes code of its own.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.fx.experimental.proxy_tensor import make_fx

from graft.backends.inductor import apart_from_dynamo, decompositions, python_dispatcher
from graft.base.errors import GraphRefused
from graft.ir.nodes import OpOverload, leaves, output_node, placeholders, val, where
from graft.ops.spec import OPS

NAMESPACE = "graft::"
KEPT = ("made_by", "stack_trace")
LEAVE = "turn off the transform that made it (graft.inductor_reports() says which), or leave standalone away"


def own_ops(graph: Graph) -> Counter[str]:
    """How often the graph calls which of graft's ops."""
    return Counter(name for node in graph.nodes for name in called(node))


def called(node: Node) -> list[str]:
    """graft's ops that a node calls, also within `auto_functionalized`."""
    targets = [node.target, *leaves((node.args, node.kwargs))]
    names = [target._schema.name for target in targets if isinstance(target, OpOverload)]
    return [name for name in names if name.startswith(NAMESPACE)]


def take_apart(graph: Graph) -> Counter[str]:
    """Every call of graft's ops becomes the ops of its reference; how many there were of each."""
    found = own_ops(graph)
    for node in list(graph.nodes):
        if names := called(node):
            replace_call(graph, node, names[0])
    return found


def replace_call(graph: Graph, node: Node, name: str) -> None:
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        raise GraphRefused(f"{where(node)} calls {name}, which writes its arguments and is not taken apart; {LEAVE}")
    body = reference_graph(node, name)
    images: dict[Node, Node] = dict(zip(placeholders(body.graph), node.all_input_nodes, strict=True))
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op != "placeholder" and inner.op != "output":
                images[inner] = graph.node_copy(inner, images.__getitem__)
                images[inner].meta |= {key: node.meta[key] for key in KEPT if key in node.meta}
    given = map_arg(output_node(body.graph).args[0], images.__getitem__)
    if isinstance(given, Node):
        node.replace_all_uses_with(given)
    else:
        for item in list(node.users):  # one of several results
            item.replace_all_uses_with(given[item.args[1]])
            graph.erase_node(item)
    graph.erase_node(node)


def reference_graph(node: Node, name: str) -> GraphModule:
    """The reference of the op for the inputs of this call, in Inductor's normal form."""
    inputs, reference = node.all_input_nodes, OPS[name.removeprefix(NAMESPACE)].reference

    def run(*values: Any) -> Any:
        table = dict(zip(inputs, values, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), table.__getitem__)
        return reference(*args, **kwargs)

    try:
        with apart_from_dynamo(), python_dispatcher(), torch.no_grad():
            body = make_fx(run, dict(decompositions()), tracing_mode="real")(*map(val, inputs))
    except Exception as error:  # whatever a reference raises that reads values
        raise GraphRefused(
            f"{where(node)} calls {name}, whose reference cannot be traced ({type(error).__name__}: {error}); {LEAVE}"
        ) from error
    if constants := [inner for inner in body.graph.nodes if inner.op == "get_attr"]:
        raise GraphRefused(f"{where(node)} calls {name}, whose reference holds {constants[0].target}; {LEAVE}")
    body.graph.eliminate_dead_code()
    return body
