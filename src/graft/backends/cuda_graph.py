"""The CUDA graph backend: the eager graph captured once and replayed, with caches bound by address.

    before:  compiled(x, k, pos) ─▶ index_copy_(k, 1, pos, x); …; mul         one launch a node
    after:   compiled(x, k, pos) ─▶ x, pos ─copy─▶ staging; one replay; mul ─copy─▶ caller

On a CPU the same code runs with direct calls in place of the replay.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from operator import getitem

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from graft.backends.capturable import capture_device
from graft.backends.capture import DIRECT, cuda_capturer
from graft.backends.eager import bind_kernels
from graft.backends.keys import Arguments, ModuleTensors
from graft.backends.lowered import Lowered
from graft.backends.nvtx import NOTE, ranges_on
from graft.backends.replay import Replays
from graft.ir.effects import mutated_roots, storage_root
from graft.ir.nodes import OpOverload, leaves, output_node, placeholders
from graft.ops.ran import gathered


def lower_cuda_graph(
    gm: GraphModule, named: Mapping[str, str] | None = None, *, reuse_outputs: bool = False
) -> Lowered:
    """`Lowered.call.replays` counts and explains the captures."""
    device = capture_device(gm.graph)
    graph, kernels = bind_kernels(gm, named)
    state = tuple(dict.fromkeys(str(node.target) for node in gm.graph.nodes if node.op == "get_attr"))
    arguments = arguments_of(gm, state, device)
    capturer = cuda_capturer(device) if device.type == "cuda" else DIRECT
    replays = Replays(body_of(graph, state).forward, arguments, capturer, reuse_outputs=reuse_outputs)
    return Lowered(shell_of(gm, replays), "cuda_graph", gathered(kernels), notes(arguments, reuse_outputs))


def arguments_of(gm: GraphModule, state: tuple[str, ...], device: torch.device) -> Arguments:
    inputs = placeholders(gm.graph)
    roots = mutated_roots(gm.graph)
    written = {index for index, node in enumerate(inputs) if node in roots}
    written |= {len(inputs) + state.index(str(node.target)) for node in roots if node.op == "get_attr"}
    names = tuple(node.name for node in inputs)
    strided = {storage_root(node) for node in gm.graph.nodes if isinstance(node.target, OpOverload) and strides(node)}
    placed = {index for index, node in enumerate(inputs) if node in strided} - written
    return Arguments(names, ModuleTensors(gm, state, device), frozenset(written), device, frozenset(placed))


def strides(node: Node) -> bool:
    """Whether it reads memory by strides of its own, which may lie outside of its argument."""
    return node.target._schema.name.startswith("aten::as_strided")


def results(graph: Graph) -> list[Node]:
    """What the captured function returns: every node in the output, once, that is not an input anyway."""
    nodes = dict.fromkeys(leaf for leaf in leaves(output_node(graph).args) if isinstance(leaf, Node))
    return [node for node in nodes if node.op != "placeholder"]


def body_of(graph: Graph, state: Sequence[str]) -> GraphModule:
    """The graph as a function of flat inputs, then state; it holds no tensor itself."""
    body, table = Graph(), {}
    for node in placeholders(graph):
        table[node] = body.placeholder(node.name)
    tensors = {name: body.placeholder(f"graft_state_{index}") for index, name in enumerate(state)}
    for node in graph.nodes:
        if node.op == "get_attr":
            table[node] = tensors[str(node.target)]
        elif node.op == "call_function":
            table[node] = body.node_copy(node, table.__getitem__)
    body.output(tuple(table[node] for node in results(graph)))
    return GraphModule(torch.nn.Module(), body, class_name="CapturedGraph")


def shell_of(gm: GraphModule, replays: Replays) -> GraphModule:
    """Takes and returns what the graph does, in the same structure, with one call inside."""
    graph, table = Graph(), {}
    for node in placeholders(gm.graph):
        table[node] = graph.node_copy(node)
    replayed = graph.call_function(replays.call, tuple(table.values()))
    for index, node in enumerate(results(gm.graph)):
        table[node] = graph.call_function(getitem, (replayed, index))
    graph.output(map_arg(output_node(gm.graph).args[0], table.__getitem__))
    graph.set_codegen(copy.copy(gm.graph._codegen))
    shell = GraphModule(torch.nn.Module(), graph, class_name="ReplayedGraph")
    shell.replays = replays
    return shell


def notes(arguments: Arguments, reuse_outputs: bool) -> tuple[str, ...]:
    bound = [arguments.name(index) for index in sorted(arguments.written)]
    lines = [f"cuda_graph: written in place, bound by address: {', '.join(bound) or 'nothing'}"]
    if arguments.placed:
        names = ", ".join(arguments.name(index) for index in sorted(arguments.placed))
        lines.append(f"cuda_graph: bound by address, as as_strided counts from the start of the storage: {names}")
    if reuse_outputs:
        lines.append("cuda_graph: the next replay overwrites the outputs (reuse_outputs)")
    if arguments.device.type == "cpu":
        lines.append("cuda_graph: the graph is on the CPU, where nothing is captured; each replay is a direct call")
    if ranges_on():
        lines.append(NOTE)
    return tuple(lines)
