"""The eager backend: the graph as Python, each graft op bound to its kernel once instead of at every call."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch.fx import Graph, GraphModule, Node, map_arg

from graft.backends.select import Lowered
from graft.backends.streams import bind_streams, placements
from graft.graph.nodes import OpOverload, arg_values, val
from graft.ops import OPS, choose
from graft.ops.spec import Kernel, OpSpec, chooser


def lower_eager(gm: GraphModule, named: Mapping[str, str] | None = None) -> Lowered:
    graph, kernels = bind_kernels(gm, named)
    return Lowered(GraphModule(gm, graph, class_name="EagerGraph"), "eager", kernels)


def bind_kernels(gm: GraphModule, named: Mapping[str, str] | None = None) -> tuple[Graph, dict[str, str]]:
    """A copy of the graph that calls kernels in place of graft's ops, and which one each op got."""
    graph = Graph()
    outputs = graph.graph_copy(gm.graph, {})
    graph.output(outputs)
    graph.set_codegen(copy.copy(gm.graph._codegen))
    named, kernels = named or {}, {}
    placed = placements(graph)
    for node in graph.nodes:
        spec = spec_of(node)
        if spec is not None:
            given = [value for _, value in arg_values(node)]
            values = [map_arg(value, val) for value in given]
            name = named.get(spec.name)
            if spec.by_call and name is None:
                node.target, node.args, node.kwargs = chooser(spec.name), tuple(given), {}
                kernels[f"graft::{spec.name}"] = describe_by_call(spec)
                continue
            kernel = choose(spec, *values, named=name)
            node.target, node.args, node.kwargs = kernel.run, tuple(given), {}
            kernels[f"graft::{spec.name}"] = describe(spec, kernel, values, name is not None)
    if placed:
        kernels["graft::stream_switch"] = bind_streams(graph, placed)
    return graph, kernels


def spec_of(node: Node) -> OpSpec | None:
    if node.op == "call_function" and isinstance(node.target, OpOverload) and node.target.namespace == "graft":
        return OPS.get(node.target._schema.name.removeprefix("graft::"))  # none of the ops of streams.py
    return None


def describe_by_call(spec: OpSpec) -> str:
    """`by call: matvec, gemm, cublas, reference`."""
    return f"by call: {', '.join(kernel.name for kernel in spec.all_kernels)}"


def describe(spec: OpSpec, chosen: Kernel, values: list[object], forced: bool = False) -> str:
    """`aten (existing_kernel)`, `reference (not triton: Triton kernels run on a GPU…)`."""
    notes = [chosen.kind] if chosen.kind != chosen.name else []
    notes += ["named in the config"] if forced else []
    reasons: dict[str, list[str]] = {}
    for kernel in spec.all_kernels:
        if kernel.name == chosen.name or forced:
            break
        reasons.setdefault(str(kernel.supports(*values)), []).append(kernel.name)
    notes += [f"not {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return f"{chosen.name} ({'; '.join(notes)})" if notes else chosen.name
