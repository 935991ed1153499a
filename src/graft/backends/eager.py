"""The eager backend: the graph as Python, each graft op bound to its kernel once instead of at every call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

from torch.fx import Graph, GraphModule, Node, map_arg

from graft.backends.lowered import Lowered
from graft.backends.nvtx import NOTE, add_ranges, ranges_on
from graft.backends.streams import bind_streams, placements
from graft.ir.branches import all_nodes, inner_graphs
from graft.ir.nodes import OpOverload, arg_values, val
from graft.ops import OPS, bind
from graft.ops.call import EAGER, Asker, Call
from graft.ops.ran import OpKernels, Ran, gathered
from graft.ops.spec import OpSpec


def lower_eager(gm: GraphModule, named: Mapping[str, str] | None = None) -> Lowered:
    bound, kernels = bind_all(gm, named)
    return Lowered(bound, "eager", gathered(kernels), (NOTE,) if ranges_on() else ())


def bind_all(gm: GraphModule, named: Mapping[str, str] | None = None) -> tuple[GraphModule, list[tuple[str, Ran]]]:
    """The graph with its kernels, and the graphs inside of it with theirs."""
    graph, kernels = bind_kernels(gm, named)
    bound = GraphModule(gm, graph, class_name="EagerGraph")
    for path, inner in inner_graphs(gm).items():
        if "." not in path:
            lowered, ran = bind_all(inner, named)
            setattr(bound, path, lowered)
            kernels += ran
    return bound, kernels


def by_eager(node: Node) -> Asker:  # noqa: ARG001
    return EAGER


def bind_kernels(
    gm: GraphModule, named: Mapping[str, str] | None = None, asker: Callable[[Node], Asker] = by_eager
) -> tuple[Graph, list[tuple[str, Ran]]]:
    """A copy of the graph that calls kernels in place of graft's ops, and which one each op got in each site."""
    graph = Graph()
    outputs = graph.graph_copy(gm.graph, {})
    graph.output(outputs)
    graph.set_codegen(copy.copy(gm.graph._codegen))
    named, kernels = named or {}, []
    placed = placements(graph)
    original = {node.name: node for node in gm.graph.nodes}
    for node in graph.nodes:
        spec = spec_of(node)
        if spec is not None:
            bound = bind(spec, call_of(node, spec, asker(node)), named.get(spec.name))
            node.target, node.args, node.kwargs = bound.run, tuple(value for _, value in arg_values(node)), {}
            kernels.append((f"graft::{spec.name}", bound.ran))
    if placed:
        kernels.append(("graft::stream_switch", Ran((bind_streams(graph, placed),))))
    if ranges_on():
        add_ranges(graph, original)
    return graph, kernels


def spec_of(node: Node) -> OpSpec | None:
    if node.op == "call_function" and isinstance(node.target, OpOverload) and node.target.namespace == "graft":
        return OPS.get(node.target._schema.name.removeprefix("graft::"))  # none of the ops of streams.py
    return None


def call_of(node: Node, spec: OpSpec, asker: Asker = EAGER) -> Call:
    """With the recorded tensors."""
    return spec.call(*(map_arg(value, val) for _, value in arg_values(node)), asker=asker)


def ran_here(gm: GraphModule) -> dict[str, OpKernels]:
    """What runs each op where torch calls it: nothing is bound, `choose` is asked at every call."""
    sites = ((node, spec) for node in all_nodes(gm.graph) if (spec := spec_of(node)) is not None)
    return gathered((f"graft::{spec.name}", bind(spec, call_of(node, spec)).ran) for node, spec in sites)
