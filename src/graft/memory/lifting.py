"""Buffers that a graph writes, as inputs of it and back as module state.

    before:  %cache = self.attn.cache          after:  %x = input
             %x = input                                %buf_attn_cache = input        (last, by keyword)
             %add_ = aten.add_(%cache, %x)             %add_ = aten.add_(%buf_attn_cache, %x)

The write stays a write in place, so whoever hands the buffer in sees what eager execution would have done to it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from graft.base.errors import LiftError, UsageError
from graft.ir.edit import attach_state, attribute, is_persistent, second_module
from graft.ir.effects import mutated_args, storage_root
from graft.ir.io.pytrees import add_keywords, drop_keywords, nesting
from graft.ir.nodes import placeholders, where
from graft.ir.storage import share_storage
from graft.ir.trace import export_graph, program_graph
from graft.memory.regions import disjoint, same_layout


@dataclass(frozen=True)
class Binding:
    """An input that stands for a buffer: its name, the buffer's dotted name and tensor, all names if it is tied."""

    input: str
    buffer: str
    tensor: torch.Tensor = field(repr=False)
    persistent: bool
    names: tuple[str, ...]


@dataclass(frozen=True)
class Lifted:
    """A graph that takes the buffers it writes as its last inputs, by the names in `bindings`."""

    graph_module: GraphModule
    bindings: tuple[Binding, ...]

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """What to add to a call: `lifted.graph_module(x, **lifted.buffers)`."""
        return {binding.input: binding.tensor for binding in self.bindings}


def lift_buffers(
    program: torch.nn.Module | torch.export.ExportedProgram,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> Lifted:
    """Turns every buffer that the graph writes into an input, given by keyword after the user's own inputs.

    A module is captured with example inputs; an ExportedProgram and a graph of graft are taken as they are. Buffers
    that are only read stay module state. One tensor under several names becomes one input. A written parameter, and
    buffers that overlap in memory without being the same, are refused.
    """
    gm, persistent, names = read_program(program, args, kwargs, dynamic_shapes)
    nodes = lifted_nodes(gm)
    if not nodes:
        return Lifted(gm, ())
    groups: dict[int, list[Node]] = {}
    for node in nodes:
        first = next(n for n in nodes if same_tensor(tensor_at(gm, n), tensor_at(gm, node)))
        groups.setdefault(nodes.index(first), []).append(node)
    bindings = []
    for members in groups.values():
        tensor, buffer = tensor_at(gm, members[0]), str(members[0].target)
        tied = [name for name, other in names.items() if same_tensor(other, tensor)]
        kept = any(name in persistent for name in tied or [buffer])
        bindings.append(Binding(make_input(gm.graph, members, nodes), buffer, tensor, kept, tuple(tied or [buffer])))
    for binding in bindings:
        for name in {binding.buffer, *binding.names}:
            remove_state(gm, name)
    add_keywords(gm.graph, [binding.input for binding in bindings])
    gm.graph.lint()
    gm.recompile()
    return Lifted(gm, tuple(bindings))


def inline_buffers(graph_module: GraphModule, bindings: Sequence[Binding]) -> GraphModule:
    """Puts lifted buffers back as module state, under all their names; the signature is the user's again."""
    gm = second_module(graph_module)
    inputs = {node.name: node for node in placeholders(gm.graph)}
    for binding in bindings:
        node = inputs.get(binding.input)
        if node is None:
            raise LiftError(f"the graph has no input {binding.input} for the buffer {binding.buffer}: {list(inputs)}")
        for name in dict.fromkeys((binding.buffer, *binding.names)):
            present = attribute(gm, name)
            if present is not None and present is not binding.tensor:
                raise LiftError(
                    f"the graph's module has another {name} already; inline into the graph that was lifted"
                )
            attach_state(gm, name, binding.tensor, persistent=binding.persistent)
        replace_input(gm.graph, node, binding.buffer)
    drop_keywords(gm.graph, [binding.input for binding in bindings])
    gm.graph.lint()
    gm.recompile()
    return gm


def read_program(
    program: torch.nn.Module | torch.export.ExportedProgram,
    args: tuple[Any, ...] | None,
    kwargs: dict[str, Any] | None,
    dynamic_shapes: Any,
) -> tuple[GraphModule, set[str], dict[str, torch.Tensor]]:
    """A graph that may be edited, the names of persistent buffers, and all buffers of the original by name."""
    if isinstance(program, torch.nn.Module) and args is not None:
        gm = export_graph(program, args, kwargs, dynamic_shapes)
        buffers = dict(program.named_buffers(remove_duplicate=False))
        return gm, {name for name in buffers if is_persistent(program, name)}, buffers
    if args is not None or kwargs is not None or dynamic_shapes is not None:
        raise UsageError("a program that is captured already keeps its inputs; leave args and dynamic_shapes out")
    if isinstance(program, torch.export.ExportedProgram):
        buffers = {**program.state_dict, **program.constants}
        tensors = {name: value for name, value in buffers.items() if isinstance(value, torch.Tensor)}
        return program_graph(program), set(program.state_dict), tensors
    if not isinstance(program, GraphModule) or any(
        n.op in ("call_module", "call_method") for n in program.graph.nodes
    ):
        raise UsageError(f"{type(program).__name__} must be captured first: lift_buffers(module, args)")
    gm = second_module(program)
    buffers = dict(gm.named_buffers(remove_duplicate=False))
    return gm, {name for name in buffers if is_persistent(gm, name)}, buffers


def lifted_nodes(gm: GraphModule) -> list[Node]:
    """Attribute nodes whose memory the graph writes, in graph order."""
    attributes = [n for n in gm.graph.nodes if n.op == "get_attr" and isinstance(tensor_at(gm, n), torch.Tensor)]
    writers: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        for argument in mutated_args(node):
            writers.setdefault(storage_root(argument), node)
    written = [n for n in attributes if n in writers]
    found = [n for n in attributes if any(overlap(tensor_at(gm, n), tensor_at(gm, w)) for w in written)]
    for node in found:
        if isinstance(tensor_at(gm, node), torch.nn.Parameter):
            refuse_parameter(gm, node, writers)
    for left, right in combinations(found, 2):
        a, b = tensor_at(gm, left), tensor_at(gm, right)
        if overlap(a, b) and not same_tensor(a, b):
            raise LiftError(
                f"the buffers {left.target} {tuple(a.shape)} and {right.target} {tuple(b.shape)} overlap in memory"
                " and the graph writes there, so they cannot be separate inputs; register one and make the other a"
                " view of it in forward"
            )
    return found


def refuse_parameter(gm: GraphModule, node: Node, writers: dict[Node, Node]) -> None:
    tensor = tensor_at(gm, node)
    writer = next(w for n, w in writers.items() if n.op == "get_attr" and overlap(tensor, tensor_at(gm, n)))
    raise LiftError(
        f"{where(writer)} writes to the parameter {node.target}; only buffers are state. Register it as a buffer, or"
        " take the write out of forward"
    )


def tensor_at(gm: GraphModule, node: Node) -> torch.Tensor:
    return attribute(gm, str(node.target))


def same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    """One tensor, or two that cover the same elements in the same way."""
    same_kind = left.dtype == right.dtype and left.device == right.device
    return left is right or (share_storage(left, right) and same_kind and same_layout(left, right))


def overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left is right or (share_storage(left, right) and not disjoint(left, right))


def make_input(graph: Graph, members: list[Node], lifted: list[Node]) -> str:
    """An input after the existing ones that is read instead of `members`; remembers where the first of them stood."""
    first, after = members[0], members[0].next
    while after in lifted:
        after = after.next
    inputs = placeholders(graph)
    if nesting(graph) is None and any(node.args for node in inputs):
        raise LiftError("the graph has inputs with default values, which lifted buffers cannot follow")
    anchor = inputs[-1] if inputs else graph._root
    with graph.inserting_after(anchor):
        node = graph.placeholder(free_name(graph, str(first.target)))
    node.meta = {**first.meta, "lifted_from": (first.name, after.name)}
    for member in members:
        member.replace_all_uses_with(node)
        graph.erase_node(member)
    return node.name


def free_name(graph: Graph, buffer: str) -> str:
    """`buf_layers_0_cache`, with a number where an input or a node has that name already."""
    info = nesting(graph)
    taken = {node.name for node in graph.nodes} | set(info.orig_args if info is not None else ())
    name = plain = "buf_" + re.sub(r"\W", "_", buffer)
    count = 1
    while name in taken:
        count += 1
        name = f"{plain}_{count}"
    return name


def remove_state(gm: GraphModule, name: str) -> None:
    owner, _, leaf = name.rpartition(".")
    if attribute(gm, name) is not None:
        delattr(gm.get_submodule(owner), leaf)


def replace_input(graph: Graph, node: Node, buffer: str) -> None:
    """An input becomes an attribute again, where it stood before it was lifted, or on top."""
    name, after = node.meta.pop("lifted_from", (None, None))
    anchor = next((n for n in graph.nodes if n.name == after), None) or next(iter(graph.nodes))
    with graph.inserting_before(anchor):
        attribute_node = graph.create_node("get_attr", buffer, name=name)
    attribute_node.meta = dict(node.meta)
    node.replace_all_uses_with(attribute_node)
    graph.erase_node(node)
