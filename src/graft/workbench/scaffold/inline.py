"""Ops of several steps, taken apart: graft's by their references, ATen's norms and softmax by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg

from graft.ir.nodes import calls, options_of, output_node, placeholders, tensor_of
from graft.ir.trace import trace_function
from graft.ops import OPS
from graft.workbench.discover.calls import is_graft

aten = torch.ops.aten
DEPTH = 4  # references call ops that have references


def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    wide = x if dtype is None else x.to(dtype)
    grown = torch.exp(wide - wide.amax(dim, keepdim=True))
    return grown / grown.sum(dim, keepdim=True)


def layer_norm(x: Tensor, shape: list[int], weight: Any, bias: Any, eps: float, cudnn: bool = True) -> Tensor:  # noqa: ARG001
    if len(shape) > 1:
        return torch.layer_norm(x, shape, weight, bias, eps)  # stays as it is
    wide = x.to(torch.float32)
    centred = wide - wide.mean(-1, keepdim=True)
    made = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    made = made if weight is None else made * weight
    return (made if bias is None else made + bias).to(x.dtype)


BY_HAND: dict[Any, Callable[..., Any]] = {aten.softmax.int: softmax, aten.layer_norm.default: layer_norm}


def inlined(gm: GraphModule) -> GraphModule:
    """The same without calls of ops that others make up; what cannot be taken apart stays."""
    for _ in range(DEPTH):
        found = next((node for node in calls(gm.graph) if apart(node) is not None), None)
        if found is None:
            return gm
        gm = without(gm)
    return gm


def apart(node: Node) -> Callable[..., Any] | None:
    if is_graft(node.target):
        spec = OPS.get(node.target._schema.name.removeprefix("graft::"))  # pyrefly: ignore
        return spec.reference if spec is not None else None
    return BY_HAND.get(node.target)


def without(gm: GraphModule) -> GraphModule:
    graph, copies = Graph(), {}
    for node in gm.graph.nodes:
        function = apart(node) if node.op == "call_function" else None
        if node.op == "output":
            graph.output(map_arg(node.args[0], copies.__getitem__))
        elif function is not None:
            copies[node] = put_in(graph, node, function, copies)
        elif (
            node.op == "call_function"
            and isinstance(given := node.args[0] if node.args else None, Node)
            and (isinstance(copies.get(given), tuple))
        ):
            copies[node] = copies[given][node.args[1]]  # an item of what was taken apart
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return GraphModule(torch.nn.Module(), graph)


def put_in(graph: Graph, node: Node, function: Callable[..., Any], copies: dict[Node, Any]) -> Any:
    values = list(options_of(node).values())
    given = [value for value in values if isinstance(value, Node)]
    tensors = tuple(torch.zeros([int(s) for s in tensor_of(n).shape], dtype=tensor_of(n).dtype) for n in given)

    def called(*args: Tensor) -> Any:
        rest = iter(args)
        return function(*(next(rest) if isinstance(value, Node) else value for value in values))

    made = trace_function(called, tensors).graph
    inner = dict(zip(placeholders(made), (copies[n] for n in given), strict=True))
    for one in calls(made):
        inner[one] = graph.node_copy(one, inner.__getitem__)
    results = output_node(made).args[0]
    if isinstance(results, (list, tuple)):
        return tuple(inner[one] for one in results)  # pyrefly: ignore
    return inner[results]  # pyrefly: ignore
