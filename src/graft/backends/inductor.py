"""The Inductor backend: the transformed graph through torch.compile, for any size of its dynamic dims."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from graft.backends.select import Lowered
from graft.graph.nodes import is_op
from graft.ops.elementwise.program import Ref, parse
from graft.ops.elementwise.reference import FUNCTIONS


def lower_inductor(gm: GraphModule) -> Lowered:
    # Inductor tries out each instruction set in a subprocess, up to 20 s; the sets it names are trusted instead
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    notes = ["inductor: compiled at the first call; graft ops run as custom ops inside it"]
    programs = [node for node in gm.graph.nodes if is_op(node, torch.ops.graft.elementwise.default)]
    if programs:
        gm = with_programs_inlined(gm)
        notes.append(
            f"inductor: {len(programs)} graft::elementwise are taken apart again; Inductor fuses them itself"
        )
    return Lowered(torch.compile(gm, dynamic=True), "inductor", {}, tuple(notes))


def with_programs_inlined(gm: GraphModule) -> GraphModule:
    """A copy in which every graft::elementwise is the torch calls of its program."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.set_codegen(copy.copy(gm.graph._codegen))
    for node in list(graph.nodes):
        if is_op(node, torch.ops.graft.elementwise.default):
            inline(graph, node)
    return GraphModule(gm, graph)


def inline(graph: Graph, node: Node) -> None:
    inputs, text = node.args
    program = parse(text)
    values: list[Node] = []

    def resolve(argument: Any) -> Any:
        if isinstance(argument, Ref):
            return inputs[argument.index] if argument.kind == "i" else values[argument.index]
        return argument

    with graph.inserting_before(node):
        for call in program.calls:
            values.append(graph.call_function(FUNCTIONS[call.op], tuple(resolve(a) for a in call.args)))
    for piece in list(node.users):  # getitem(node, index)
        piece.replace_all_uses_with(values[program.returns[piece.args[1]]])
        graph.erase_node(piece)
    graph.erase_node(node)
