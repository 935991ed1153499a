"""Whether a value may be written in place, and what must be done first: the proof, or the reason against it."""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem

import torch
from torch.fx import Node

from graft.ir.nodes import is_op, leaves, output_node, tensor_of, tensor_val
from graft.memory.aliases import Read
from graft.memory.inductor_fix.moves import keeps_layout, lift_plan
from graft.memory.inductor_fix.work import (
    FUNCTIONAL,
    INPLACEABLE,
    FunctionalCall,
    GraphWork,
    View,
    same_nodes,
    write_back,
)
from graft.memory.regions import disjoint


@dataclass(frozen=True)
class InplacePlan:
    """What makes a write in place right."""

    lift: tuple[Node, ...] = ()
    detach: tuple[Read, ...] = ()  # readers that get a copy of the old value
    protect_old: Node | None = None
    protect_new: Node | None = None


def plan_write(work: GraphWork, call: FunctionalCall, index: int) -> InplacePlan | str:
    """How base `index` can be written in place, or why it cannot.

    A value of the graph's own may be written when nobody reads it later. A graph input may be written when a `copy_`
    at the end overwrites it anyway, nobody reads its old value up to there, and what the op leaves in it is not read
    after that `copy_`, unless it is the very value that is written back.
    """
    base, node, end = call.bases[index], call.node, None
    inputs = work.aliases.inputs(base)
    if inputs:
        if inputs != [base]:
            return (
                f"it may be in the memory of graph input %{inputs[0].name}, which the caller must not see change so"
            )
        end = write_back(base)
        if end is None or end < node:
            return f"graph input %{base.name} must not change"
    parts = written_parts(call, index)
    old = [read for read in work.aliases.reads(base, node, end) if overlaps(parts, read.through)]
    if end is not None and work.aliases.same(end.args[1], base):
        old.append(Read(end, end.args[1]))  # the caller is to see the old value
    returned = {read.through for read in old if read.reader.op == "output"}
    inner = [read for read in old if read.reader.op != "output"]
    stuck = [read for read in inner if lift_plan([read.reader], node)[1] is not None]
    if stuck and not (written_back(call, index, end) and copied_alone({r.through for r in stuck}, node)):
        return f"{stuck[0].text()} after the write"
    protect_old = protectable(returned, node)
    if isinstance(protect_old, str):
        return f"{protect_old} with its old value"
    protect_new = left_after(work, call, index, end) if end is not None else None
    if isinstance(protect_new, str):
        return protect_new
    lifted, _ = lift_plan([read.reader for read in inner if read not in stuck], node)
    return InplacePlan(tuple(lifted), tuple(stuck), protect_old, protect_new)


def written_back(call: FunctionalCall, index: int, end: Node | None) -> bool:
    """The new value of base `index`, or what later writes make of it, is what the caller sees in the end.

    Then the input is its place: a reader of the old value gets a copy, rather than the call a copy and the input a
    write-back.
    """
    reached = call.results(index) if end is not None else []
    for node in reached:
        if end is not None and end.args[1] is node:
            return True
        further = [user for user in node.users if is_op(user, getitem, *FUNCTIONAL, *INPLACEABLE)]
        reached += [user for user in further if user not in reached]
    return False


def left_after(work: GraphWork, call: FunctionalCall, index: int, end: Node) -> Node | str | None:
    """The one result to copy, because `end` overwrites it and it is returned; or what forbids the write."""
    source, results = end.args[1], call.results(index)
    if source in results or not results:
        return None
    if any(work.aliases.same(source, result) for result in results):
        if same_nodes(results[0], call.bases[index]) and same_nodes(source, end.args[0]):
            return None
        return f"%{end.name} writes back %{source.name}, a view of the result"
    late = [read for result in results for read in work.aliases.reads(result, end)]
    if any(read.reader.op != "output" for read in late):
        return f"{late[0].text()} after %{end.name} overwrites it"
    return protectable({read.through for read in late}, max(call.node.users).next)


def protectable(returned: set[Node], position: Node) -> Node | str | None:
    """The one returned value that is to be copied above `position`, rather than the base; a text when that cannot
    be."""
    if not returned or copied_alone(returned, position):
        return min(returned, default=None)
    return Read(output_node(min(returned).graph), min(returned)).text()


def copied_alone(values: set[Node], position: Node) -> bool:
    """One value, which a clone above `position` can stand for; copies of several may cost more than one of the
    base."""
    first = min(values)
    return len(values) == 1 and keeps_layout(first) and (first is position or lift_plan([first], position)[1] is None)


def written_parts(call: FunctionalCall, index: int) -> list[torch.Tensor] | None:
    """The views through which the op writes base `index`; None when it writes all of it."""
    views = [leaf for leaf in leaves(call.arguments) if isinstance(leaf, View) and leaf.base == index]
    if any(leaf.target is None for leaf in views):
        return None
    base = tensor_of(call.bases[index])
    return [view.of(base) for view in views]


def overlaps(parts: list[torch.Tensor] | None, value: Node) -> bool:
    """False when `value` is proven to be in none of the `parts` that are written."""
    tensor = tensor_val(value)
    return parts is None or tensor is None or not all(disjoint(part, tensor) for part in parts)
