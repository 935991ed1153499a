"""One functional call back to its mutating op: which of the values it overwrites may be written in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from graft.graph.edit import INHERITED
from graft.graph.nodes import is_op, leaves, output_node, tensor_of, tensor_val, val
from graft.state.aliases import Aliases, Read, refresh_views
from graft.state.moves import copy_node, insert, keeps_layout, lift, lift_plan, opaque_copy
from graft.state.regions import disjoint, same_layout
from graft.state.report import FunctionalizationReport, KeptCopy, MovedRead

aten = torch.ops.aten
FUNCTIONAL = (torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2)
# what Inductor's reinplace_inplaceable_ops may write in place (argument 0), and the view through which it then writes
INPLACEABLE: dict[Any, Any] = {
    aten.index_put.default: None,
    aten._unsafe_index_put.default: None,
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.as_strided_scatter.default: aten.as_strided.default,
    aten.diagonal_scatter.default: aten.diagonal.default,
}


@dataclass(frozen=True)
class View:
    """An argument that is written through a view of a base: `target(base, *args)`, or the base itself."""

    base: int
    target: Any = None
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class FunctionalCall:
    """`auto_functionalized` taken apart: `op(**arguments)` overwrites `bases`, and the graph goes on with copies."""

    node: Node
    op: Any
    arguments: dict[str, Any]  # a View in place of every written argument
    bases: tuple[Node, ...]
    positions: tuple[int, ...]  # where the new value of each base is among the node's results
    eager: dict[str, Any] | None = None  # the abstract arguments as eager saw them

    def results(self, base: int) -> list[Node]:
        return [user for user in self.node.users if user.args[1] == self.positions[base]]


@dataclass
class Work:
    """One graph while it is rewritten, and what was done so far."""

    graph: Graph
    aliases: Aliases
    settle: Callable[[Any], Any]  # put in front of a write: who reads the old value later has it by then
    restored: list[str] = field(default_factory=list)
    kept: list[KeptCopy] = field(default_factory=list)
    protected: list[KeptCopy] = field(default_factory=list)
    moved: list[MovedRead] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)

    def report(self) -> FunctionalizationReport:
        return FunctionalizationReport(
            tuple(self.restored), tuple(self.kept), tuple(self.protected), tuple(self.moved), tuple(self.left)
        )

    def copy(self, value: Node, before: Node, *, any_layout: bool = False, opaque: bool = False) -> Node | None:
        first = before.prev
        if opaque:
            copied = opaque_copy(self.graph, value, before=before)
        else:
            copied = copy_node(self.graph, value, before=before, any_layout=any_layout)
        while (first := first.next) is not before:
            self.aliases.add(first)
        return copied

    def protect(self, value: Node, before: Node, by: Node, reason: str) -> None:
        """Returns a copy of `value`, taken above `before`."""
        if before is value:
            before = value.next
        lift(lift_plan([value], before)[0], before)
        copied = self.copy(value, before, any_layout=True)
        output_node(self.graph).replace_input_with(value, copied)
        self.protected.append(KeptCopy(by.name, str(by.target), value.name, reason))


def write_back(value: Node) -> Node | None:
    """The `copy_` at the end of the graph through which the caller sees a graph input change."""
    found = [user for user in value.users if is_op(user, aten.copy_.default) and user.args[0] is value]
    return found[0] if len(found) == 1 else None


def same_nodes(left: Node, right: Node) -> bool:
    """Both are tensors of one layout."""
    a, b = tensor_val(left), tensor_val(right)
    return a is not None and b is not None and same_layout(a, b)


@dataclass(frozen=True)
class Plan:
    """What makes a write in place right."""

    lift: tuple[Node, ...] = ()
    detach: tuple[Read, ...] = ()  # readers that get a copy of the old value
    protect_old: Node | None = None
    protect_new: Node | None = None


def plan_write(work: Work, call: FunctionalCall, index: int) -> Plan | str:
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
    old = [r for r in work.aliases.reads(base, node, end) if overlaps(call, index, r.through)]
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
    return Plan(tuple(lifted), tuple(stuck), protect_old, protect_new)


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


def left_after(work: Work, call: FunctionalCall, index: int, end: Node) -> Node | str | None:
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


def protectable(returned: set[Node], place: Node) -> Node | str | None:
    """The one returned value that is to be copied above `place`, rather than the base; a text when that cannot be."""
    if not returned or copied_alone(returned, place):
        return min(returned, default=None)
    return Read(output_node(min(returned).graph), min(returned)).text()


def copied_alone(values: set[Node], place: Node) -> bool:
    """One value, which a clone above `place` can stand for; copies of several may cost more than one of the base."""
    first = min(values)
    return len(values) == 1 and keeps_layout(first) and (first is place or lift_plan([first], place)[1] is None)


def overlaps(call: FunctionalCall, index: int, value: Node) -> bool:
    """False when the op writes base `index` only where `value` is proven not to be."""
    tensor = tensor_val(value)
    views = [leaf for leaf in leaves(call.arguments) if isinstance(leaf, View) and leaf.base == index]
    if tensor is None or any(leaf.target is None for leaf in views):
        return True
    base = tensor_of(call.bases[index])
    written = [view.target(base, *map_arg(view.args, val)) for view in views]
    return not all(disjoint(part, tensor) for part in written)


def restore(work: Work, call: FunctionalCall) -> None:
    """Replaces the functional call by the op; values that cannot be written in place are copied first."""
    node = call.node
    for user in sorted(node.users, reverse=True):
        node.append(user)  # results may have sunk below later writes
    bases: list[Node] = []
    for index, base in enumerate(call.bases):
        plan = shared_base(work, bases, base) or plan_write(work, call, index)
        if isinstance(plan, Plan):
            carry_out(work, call, index, plan)
            bases.append(base)
            continue
        loose = all(not is_op_view(leaf, index) for leaf in leaves(call.arguments))
        copied = work.copy(base, node, any_layout=loose)
        if copied is None:
            work.left.append((node.name, f"%{base.name} has symbolic strides; {plan}"))
            return
        work.kept.append(KeptCopy(node.name, str(call.op), base.name, plan))
        bases.append(copied)
    rewrite(work, call, bases)
    work.restored.append(node.name)


def is_op_view(leaf: object, index: int) -> bool:
    return isinstance(leaf, View) and leaf.base == index and leaf.target is aten.as_strided.default


def shared_base(work: Work, taken: list[Node], base: Node) -> str | None:
    """Why two values that one op overwrites cannot both stay in place."""
    other = next((n for n in taken if work.aliases.may_alias(n, base)), None)
    return None if other is None else f"it shares memory with %{other.name}, which the op overwrites too"


def carry_out(work: Work, call: FunctionalCall, index: int, plan: Plan) -> None:
    node = call.node
    lift(plan.lift, node)
    work.moved += [MovedRead(moved.name, node.name) for moved in plan.lift]
    if plan.detach:
        value = plan.detach[0].through
        lift(lift_plan([value], node)[0], node)
        copied = work.copy(value, node)
        for read in plan.detach:
            read.reader.replace_input_with(value, copied)
            target, reason = str(read.reader.target), f"%{node.name} overwrites it"
            work.kept.append(KeptCopy(read.reader.name, target, value.name, reason))
    if plan.protect_old is not None:
        work.protect(plan.protect_old, node, node, f"%{node.name} overwrites it")
    if plan.protect_new is not None:
        place = max(node.users).next
        work.protect(plan.protect_new, place, node, f"it is in graph input %{call.bases[index].name}, written later")


def rewrite(work: Work, call: FunctionalCall, bases: list[Node]) -> None:
    """The op itself on `bases`; who read a result reads the base."""
    node, graph = call.node, work.graph
    settled = [settled_base(work, call, index, base) for index, base in enumerate(bases)]

    def argument(value: Any) -> Any:
        if isinstance(value, View):
            base = settled[value.base]
            if value.target is None:
                return base
            view = insert(graph, value.target, (base, *value.args), before=node, like=node)
            work.aliases.add(view)
            return view
        if isinstance(value, (list, tuple)):
            return [argument(item) for item in value]
        return unshared(work, call, bases, value) if isinstance(value, Node) else value

    args, kwargs = positional(call.op, {name: argument(value) for name, value in call.arguments.items()})
    with graph.inserting_before(node):
        new = graph.call_function(call.op, args, kwargs)
    new.meta = {key: node.meta[key] for key in INHERITED if key in node.meta}
    count = len(call.op._schema.returns)
    own = (val(node) or (None,))[: max(count, 1)]
    new.meta["val"] = own[0] if count <= 1 else tuple(own)
    if call.eager is not None:
        new.meta["eager_input_vals"] = positional(call.op, call.eager)
    work.aliases.add(new)
    for user in list(node.users):
        position = user.args[1]
        if position in call.positions:
            adopt(work, user, bases[call.positions.index(position)])
        elif count > 1:
            user.args = (new, position)
        else:
            adopt(work, user, new)
    work.aliases.forget(node)
    graph.erase_node(node)


def settled_base(work: Work, call: FunctionalCall, index: int, base: Node) -> Node:
    """The base as the op takes it. A copy has no other readers; a base written in place may have."""
    if base is not call.bases[index]:
        return base
    settled = insert(work.graph, work.settle, (base,), before=call.node, like=call.node)
    work.aliases.add(settled)
    return settled


def positional(op: Any, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by name as a call has them: Inductor's `normalize_function` takes no positional one by name."""
    rest, args = dict(arguments), []
    for argument in op._schema.arguments:
        if argument.kwarg_only or argument.name not in rest:
            break
        args.append(rest.pop(argument.name))
    return tuple(args), rest


def unshared(work: Work, call: FunctionalCall, bases: list[Node], value: Node) -> Node:
    """An argument that the op only reads, copied when the op overwrites its memory."""
    for index, base in enumerate(bases):
        if base is call.bases[index] and work.aliases.same(value, base) and overlaps(call, index, value):
            reason = f"the op reads it while it overwrites %{base.name}"
            work.kept.append(KeptCopy(call.node.name, str(call.op), value.name, reason))
            return work.copy(value, call.node, any_layout=True) or value
    return value


def adopt(work: Work, old: Node, new: Node) -> None:
    """Who reads `old` reads `new`; views of `old` are views of `new` from here on."""
    members = sorted(n for n in work.aliases.group(old) if n is not old)
    work.aliases.join(new, old)
    work.aliases.forget(old)
    old.replace_all_uses_with(new)
    work.graph.erase_node(old)
    refresh_views(members)


def functional_results(node: Node) -> bool:
    """All users take one result, so that each can be replaced."""
    return all(is_op(user, getitem) for user in node.users)
