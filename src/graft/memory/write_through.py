"""A result that is computed and then copied over memory of the caller is computed there.

before:  %n = aten.mul(%x, %w);  … %n is read …;  aten.copy_(%out, %n)
after:   %n = aten.mul.out(%x, %w, out=%out);  … %n is read …

Numerics: bitwise; the same kernel writes the same values, if both tensors lie in memory the same way.
"""

from __future__ import annotations

from collections.abc import Set
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node

from graft.ir.checks import check_between
from graft.ir.effects import alias_sources, is_mutating, mutated_args, nodes_in, with_views
from graft.ir.nodes import OpOverload, is_op, output_node, same_shape, same_sizes, tensor_val
from graft.memory.aliases import Aliases

aten = torch.ops.aten


def write_through(graph: Graph, inputs: Set[Node]) -> list[str]:
    """Does so for every copy over one of `inputs` that allows it; the names of the nodes that write there now."""
    asked = [node for node in graph.nodes if is_op(node, aten.copy_.default) and node.args[0] in inputs]
    return [write_direct(graph, copy) for copy in asked if why_copied(graph, copy) is None]


def write_direct(graph: Graph, copy: Node) -> str:
    into, value = copy.args[:2]
    with graph.inserting_before(value):
        direct = graph.call_function(out_overload(value.target), value.args, {**value.kwargs, "out": into})
    direct.meta = dict(value.meta)
    value.replace_all_uses_with(direct)
    copy.replace_all_uses_with(into)
    graph.erase_node(copy)
    graph.erase_node(value)
    return direct.name


def why_copied(graph: Graph, copy: Node) -> str | None:
    """Why the value is computed elsewhere and copied; None where it can be computed in its destination."""
    into, value = copy.args[:2]
    if not (isinstance(into, Node) and into.op == "placeholder" and isinstance(value, Node)):
        return "it is not copied over a whole input"
    if not isinstance(value.target, OpOverload) or is_mutating(value) or alias_sources(value):
        return f"%{value.name} is a view, or written already"
    if (
        out_overload(value.target) is None
        or other_steps(value)
        or torch.Tag.nondeterministic_seeded in value.target.tags
    ):
        return f"{value.target} has no out= form"
    target, given = tensor_val(into), tensor_val(value)
    if target is None or given is None or target.dtype != given.dtype or not same_shape(target, given):
        return f"%{value.name} has another shape or dtype than %{into.name}"
    if not same_sizes(target.stride(), given.stride()):
        return f"%{value.name} lies in memory in another way than %{into.name}"
    if any(user.op == "output" for alias in with_views([value]) for user in alias.users):
        return f"%{value.name} is returned as well"
    return hindrance(graph, into, value, copy)


def hindrance(graph: Graph, into: Node, value: Node, copy: Node) -> str | None:
    """Who else looks at the memory, or changes it, from where the value is computed until it is copied, and after."""
    if (check := check_between(value, copy)) is not None:
        return f"%{check.name} checks a value before the copy"
    aliases = Aliases(graph, within=[into])
    pointwise = torch.Tag.pointwise in value.target.tags
    for source in nodes_in([*value.args, *value.kwargs.values()]):
        if source in aliases and not (pointwise and source is into):
            return f"%{value.name} reads %{source.name} while it would be written"
    end = output_node(graph)
    for member in aliases.group(into):
        for user in member.users:
            if user not in (value, copy, end) and value < user:
                return f"%{user.name} looks at %{member.name} after %{value.name}"
    for alias in with_views([value]):  # which is `into` itself from then on
        for user in alias.users:
            if copy < user and alias in mutated_args(user):
                return f"%{user.name} writes to %{alias.name} after it is copied"
            if is_op(user, aten.as_strided.default):
                return f"%{user.name} reads %{alias.name} by its address"
    return None


def other_steps(value: Node) -> bool:
    """Composite ops have an out= form written by hand, which may take other steps than they do.

    linear.out of 1-D and 3-D inputs is matmul and add_ where linear is addmm: other bits in 16-bit types. matmul.out
    of a vector resizes its destination. Of matrices both are the one GEMM.
    """
    if not value.target._can_decompose():
        return False
    if not is_op(value, aten.linear.default, aten.matmul.default):
        return True
    matrices = [tensor_val(source) for source in value.args[:2] if isinstance(source, Node)]
    return len(matrices) != 2 or any(matrix is None or matrix.dim() != 2 for matrix in matrices)


@cache
def out_overload(target: Any) -> Any:
    """The form of an op that writes its one result to `out`; None where there is none."""
    schema = target._schema
    if schema.name.partition("::")[0] != "aten" or len(schema.returns) != 1:
        return None
    wanted = [(argument.name, str(argument.type)) for argument in schema.arguments]
    packet = getattr(aten, schema.name.removeprefix("aten::"))
    for name in packet.overloads():
        found = getattr(packet, name)
        arguments = found._schema.arguments
        plain = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
        outs = [argument.name for argument in arguments if argument.is_out]
        if outs == ["out"] and plain == wanted and str(schema.returns[0].type) == "Tensor":
            return found
    return None
