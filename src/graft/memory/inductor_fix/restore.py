"""One functional call back to its mutating op."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from graft.ir.edit import INHERITED
from graft.ir.nodes import leaves, module_path, val, where
from graft.memory.aliases import refresh_views
from graft.memory.inductor_fix.inplace import InplacePlan, overlaps, plan_write, written_parts
from graft.memory.inductor_fix.moves import insert, lift, lift_plan
from graft.memory.inductor_fix.offsets import copied_stretch, view_arguments
from graft.memory.inductor_fix.report import KeptCopy, MovedRead, RestoredCall
from graft.memory.inductor_fix.work import FunctionalCall, GraphWork, View

aten = torch.ops.aten


def restore(work: GraphWork, call: FunctionalCall) -> None:
    """Replaces the functional call by the op; values that cannot be written in place are copied first."""
    node = call.node
    for user in sorted(node.users, reverse=True):
        node.append(user)  # results may have sunk below later writes
    bases: list[Node] = []
    for index, base in enumerate(call.bases):
        plan = shared_base(work, bases, base) or plan_write(work, call, index)
        if isinstance(plan, InplacePlan):
            carry_out(work, call, index, plan)
            bases.append(base)
            continue
        loose = all(not is_strided_view(leaf, index) for leaf in leaves(call.arguments))
        copied = work.copy(base, node, any_layout=loose) or copied_stretch(work, base, node)
        if copied is None:
            work.left.append((node.name, f"%{base.name} has symbolic strides; {plan}"))
            return
        work.kept.append(KeptCopy.of(node.name, str(call.op), base, plan))
        bases.append(copied)
    name, anchor, module = node.name, where(node), module_path(node)
    made = rewrite(work, call, bases)
    work.restored.append(RestoredCall(name, str(call.op), anchor, module, made.name))


def is_strided_view(leaf: object, index: int) -> bool:
    return isinstance(leaf, View) and leaf.base == index and leaf.target is aten.as_strided.default


def shared_base(work: GraphWork, taken: list[Node], base: Node) -> str | None:
    """Why two values that one op overwrites cannot both stay in place."""
    other = next((n for n in taken if work.aliases.may_alias(n, base)), None)
    return None if other is None else f"it shares memory with %{other.name}, which the op overwrites too"


def carry_out(work: GraphWork, call: FunctionalCall, index: int, plan: InplacePlan) -> None:
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
            work.kept.append(KeptCopy.of(read.reader.name, target, value, reason))
    if plan.protect_old is not None:
        work.protect(plan.protect_old, node, node, f"%{node.name} overwrites it")
    if plan.protect_new is not None:
        below = max(node.users).next
        work.protect(plan.protect_new, below, node, f"it is in graph input %{call.bases[index].name}, written later")


def rewrite(work: GraphWork, call: FunctionalCall, bases: list[Node]) -> Node:
    """The op itself on `bases`; who read a result reads the base."""
    node, graph = call.node, work.graph
    settled = [settled_base(work, call, index, base) for index, base in enumerate(bases)]

    def argument(value: Any) -> Any:
        if isinstance(value, View):
            base = settled[value.base]
            if value.target is None:
                return base
            where = view_arguments(work.offset_of, value, call.bases[value.base], base, node)
            view = insert(graph, value.target, (base, *where), before=node, like=node)
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
    if call.found:
        new.meta["unbacked_bindings"] = call.found
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
    return new


def settled_base(work: GraphWork, call: FunctionalCall, index: int, base: Node) -> Node:
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


def unshared(work: GraphWork, call: FunctionalCall, bases: list[Node], value: Node) -> Node:
    """An argument that the op only reads, copied when the op overwrites its memory."""
    for index, base in enumerate(bases):
        if (
            base is call.bases[index]
            and work.aliases.same(value, base)
            and overlaps(written_parts(call, index), value)
        ):
            reason = f"the op reads it while it overwrites %{base.name}"
            work.kept.append(KeptCopy.of(call.node.name, str(call.op), value, reason))
            return work.copy(value, call.node, any_layout=True) or value
    return value


def adopt(work: GraphWork, old: Node, new: Node) -> None:
    """Who reads `old` reads `new`; views of `old` are views of `new` from here on."""
    members = sorted(n for n in work.aliases.group(old) if n is not old)
    work.aliases.join(new, old)
    work.aliases.forget(old)
    old.replace_all_uses_with(new)
    work.graph.erase_node(old)
    refresh_views(members)
