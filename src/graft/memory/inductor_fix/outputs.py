"""What a graph gives back: returned values and written-back inputs whose memory is not theirs alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from graft.ir.nodes import is_op, leaves, output_node, tensor_val
from graft.memory.aliases import Aliases
from graft.memory.inductor_fix.report import KeptCopy
from graft.memory.inductor_fix.work import GraphWork

aten = torch.ops.aten


@dataclass(frozen=True)
class OutputAliases:
    """How eager's results lie in memory, by position among the graph's outputs; None where that is not known."""

    apart: frozenset[int] | None = None  # in no graph input
    groups: tuple[int, ...] | None = None  # equal numbers share memory

    def is_apart(self, position: int) -> bool | None:
        return None if self.apart is None else position in self.apart

    def share(self, left: int, right: int) -> bool:
        return self.groups is None or self.groups[left] == self.groups[right]


def output_groups(graph: Graph) -> tuple[int, ...]:
    """A number for each output, equal for those that share memory."""
    aliases = Aliases(graph, trusted=True)
    values = [value for value in leaves(output_node(graph).args[0])]
    first: dict[int, int] = {}
    for position, value in enumerate(values):
        if isinstance(value, Node):
            first.setdefault(id(aliases.group(value)), position)
    return tuple(
        first[id(aliases.group(v))] if isinstance(v, Node) else position for position, v in enumerate(values)
    )


def mend_removed_clones(work: GraphWork, outputs: OutputAliases) -> None:
    """Clones again what remove_noop_ops should have left.

    It keeps a clone that stands between a graph input and an output, but looks for them in recorded storages that its
    own replacements made untrue: `v = x.clone()[1:].clone(); x.add_(1); return v` loses both clones. A clone that
    `copy_` writes into one input from another is never kept: `r.copy_(q); q.add_(1)` reads q after it was written.
    """
    returned = list(leaves(output_node(work.graph).args[0]))
    for position, value in enumerate(returned):
        if tensor_val(value) is None:
            continue
        inputs = work.aliases.inputs(value)
        if inputs and outputs.is_apart(position):
            reason = f"eager returns it apart from graph input %{inputs[0].name}"
            return_copy(work, position, after_definition(value), reason)
        elif not inputs and (other := merged(work, outputs, returned, position)) is not None:
            return_copy(work, position, output_node(work.graph), f"eager returns it apart from %{other.name}")
    written: list[Node] = []  # graph inputs that are overwritten above
    for node in [n for n in work.graph.nodes if is_op(n, aten.copy_.default)]:
        owner, source = node.args[:2]
        stale = [n for n in work.aliases.inputs(source) if n in written]
        if stale:
            copied = work.copy(source, after_definition(source), any_layout=True)
            node.args = (owner, copied, *node.args[2:])
            reason = f"graph input %{stale[0].name} is overwritten before %{node.name} reads it"
            work.kept.append(KeptCopy.of(node.name, str(node.target), source, reason))
        written.append(owner)


def merged(work: GraphWork, outputs: OutputAliases, returned: list[Any], position: int) -> Node | None:
    """An output above `position` with which it shares memory now, but not in eager: `return v, v.clone()`."""
    for other, value in enumerate(returned[:position]):
        if (
            isinstance(value, Node)
            and work.aliases.same(value, returned[position])
            and not outputs.share(other, position)
        ):
            return value
    return None


def after_definition(value: Node) -> Node:
    """The position right below a node; below all inputs for an input."""
    position = value.next
    while position.op == "placeholder":
        position = position.next
    return position


def return_copy(work: GraphWork, position: int, before: Node, reason: str) -> None:
    """Output `position` returns a copy, taken above `before`."""
    output = output_node(work.graph)
    values = list(leaves(output.args[0]))
    work.protected.append(KeptCopy.of(output.name, "output", values[position], reason))
    values[position] = work.copy(values[position], before, any_layout=True)
    output.args = (tuple(values),)


def keep_outputs_apart(work: GraphWork, homes: dict[Node, Node], outputs: OutputAliases, known: set[Node]) -> None:
    """A returned value that eager keeps apart from the graph inputs is copied where writes in place put it into one.

    `op(c); return c.clone()` has lost its clone by now: the caller would get its own input back. `known` are values
    that were in an input before.
    """
    output = output_node(work.graph)
    for position, value in enumerate(leaves(output.args[0])):
        if tensor_val(value) is None or value in known or outputs.is_apart(position) is False:
            continue
        owners = work.aliases.inputs(value) or [homes[n] for n in work.aliases.group(value) if n in homes]
        if owners:
            return_copy(work, position, output, f"it is in the memory of graph input %{owners[0].name}")
