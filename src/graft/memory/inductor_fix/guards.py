"""Calls that Inductor's own reinplacing makes writes of, later: kept right, and given room to be written in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node, map_arg

from graft.ir.effects import written_args
from graft.ir.nodes import OpOverload, is_op, leaves, same_sizes, tensor_val, val
from graft.memory.inductor_fix.moves import lift, lift_plan
from graft.memory.inductor_fix.report import KeptCopy, MovedRead
from graft.memory.inductor_fix.work import INPLACEABLE, GraphWork, same_nodes, write_back
from graft.memory.regions import disjoint, same_layout

aten = torch.ops.aten
EXTERN = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default)


def is_inplaceable(node: Node) -> bool:
    return is_op(node, *INPLACEABLE)


def written_part(node: Node) -> torch.Tensor | None:
    """The view of its argument 0 that `node` writes through, when it is a scatter."""
    view, base = INPLACEABLE[node.target], tensor_val(node.args[0])
    if view is None or base is None:
        return None
    return view(base, *map_arg(node.args[2:], val), **map_arg(node.kwargs, val))


def overlaps(node: Node, value: Node) -> bool:
    """False when `node`, written in place, leaves the memory of `value` alone."""
    part, tensor = written_part(node), tensor_val(value)
    return part is None or tensor is None or not disjoint(part, tensor)


def in_place(node: Node, value: Node) -> bool:
    """A scatter that writes every element of `value` where it is already: `x[0] = x[0].clone()`."""
    part, tensor = written_part(node), tensor_val(value)
    return part is not None and tensor is not None and same_layout(part, tensor)


def home(work: GraphWork, homes: dict[Node, Node], value: Node) -> Node | None:
    """The graph input in whose memory `value` may end, when that input is written back at the end."""
    inputs = work.aliases.inputs(value) or [homes[n] for n in work.aliases.group(value) if n in homes]
    return inputs[0] if inputs and write_back(inputs[0]) is not None else None


def make_room(work: GraphWork, homes: dict[Node, Node], node: Node) -> None:
    """Moves reads of the old value above `node`, when that is all that keeps Inductor from writing in place."""
    value = node.args[0]
    owner = home(work, homes, value)
    end = write_back(owner) if owner is not None else None
    if owner is None or end is None or end < node:
        return
    old = [read for read in work.aliases.reads(value, node, end) if overlaps(node, read.through)]
    plan, stuck = lift_plan([read.reader for read in old], node)
    if stuck is None:
        homes[node] = owner
        lift(plan, node)
        work.moved += [MovedRead(moved.name, node.name) for moved in plan]


def guard_writes(work: GraphWork) -> dict[Node, Node]:
    """Copies what a later write in place would spoil. Returns the graph input in whose memory each result may end."""
    homes: dict[Node, Node] = {}
    writes = written_args(work.graph)
    for node in [n for n in work.graph.nodes if is_inplaceable(n)]:
        value = node.args[0]
        owner = home(work, homes, value)
        end = write_back(owner) if owner is not None else None
        if work.aliases.inputs(value) and (end is None or end < node):
            continue  # a graph input that nobody overwrites is never written
        guard_sources(work, node, last_write(work, writes, homes, value, node))
        if owner is None or end is None or end < node:
            continue
        # Inductor sees that `end` overwrites the input anyway and writes there, whoever still reads the result
        reason = spoiled(work, node, end)
        if reason is None:
            homes[node] = owner
        else:
            keep(work, node, value, reason)
    return homes


def guard_sources(work: GraphWork, node: Node, since: Node | None) -> None:
    """Copies arguments of `node` that read, elsewhere, the memory that it overwrites.

    Inductor asks who reads it after the call, not whether the call itself does: `x[1:] = x[:-1].clone()` has lost its
    clone by now (remove_noop_ops) and would become one kernel that reads x[i - 1] and writes x[i]. A value computed
    from it (`x[:-1] + 1`) is right, unless the memory was written before (`since`): then the scheduler knows it by
    another name and fuses the read with the write all the same. An opaque copy stays in both cases.
    """
    value, part = node.args[0], written_part(node)
    for other in {n for n in leaves((node.args[1:], node.kwargs)) if isinstance(n, Node)}:
        view = work.aliases.same(other, value) and overlaps(node, other) and not in_place(node, other)
        if view or (since is not None and reads_elsewhere(work, other, value, part, since)):
            reason = f"the call reads %{value.name} while it overwrites it"
            keep(work, node, other, reason, opaque=True)


def last_write(
    work: GraphWork, writes: list[tuple[Node, Node]], homes: dict[Node, Node], value: Node, node: Node
) -> Node | None:
    """The last call above `node` that writes, or is to write, the memory of `value`."""
    found = [call for call, arg in writes if call < node and work.aliases.same(arg, value)]
    found += [other for other in work.aliases.group(value) if other in homes]
    return max(found, default=None)


def reads_elsewhere(
    work: GraphWork,
    source: Node,
    value: Node,
    part: torch.Tensor | None,
    since: Node,
    moved_in: Sequence[Node] = (),
) -> bool:
    """`source` is computed, below `since`, from other elements of the memory of `value` than it is written to.

    `moved_in` are results that will be in that memory too.
    """
    seen, stack = set(), [(source, part is not None)]
    while stack:
        node, aligned = stack.pop()
        if (node, aligned) in seen:
            continue
        seen.add((node, aligned))
        tensor = tensor_val(node)
        inside = next((other for other in moved_in if work.aliases.same(node, other)), None)
        if inside is not None or work.aliases.same(node, value):
            known = inside is None or keeps_positions(work, inside, moved_in)
            if not (aligned and known and part is not None and tensor is not None and same_layout(tensor, part)):
                return True
        elif node.op == "call_function" and since < node and not is_extern(node):
            # element by element, of one shape: reads the position that it writes
            pointwise = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
            same = tensor is not None and part is not None and same_sizes(tensor.shape, part.shape)
            stack += [(argument, aligned and pointwise and same) for argument in node.all_input_nodes]
    return False


def keeps_positions(work: GraphWork, node: Node, moved_in: Sequence[Node]) -> bool:
    """The recorded layout of `node` is the one that it has when it is written into its argument 0."""
    value = node.args[0]
    below = next((other for other in moved_in if other < node and work.aliases.same(value, other)), None)
    return same_nodes(node, value) and (below is None or keeps_positions(work, below, moved_in))


def is_extern(node: Node) -> bool:
    """Calls a kernel that Inductor does not write, and so does not fuse with others."""
    return isinstance(node.target, OpOverload) and (
        node.target in EXTERN or node.target.namespace not in ("aten", "prims")
    )


def spoiled(work: GraphWork, node: Node, end: Node) -> str | None:
    """Why the result of `node` may not be in the input that `end` overwrites."""
    source = end.args[1]
    if source is node:
        return None
    if work.aliases.same(source, node.args[0]):
        return f"%{end.name} writes back %{source.name}, its old value"
    if work.aliases.same(source, node):
        if same_nodes(node, node.args[0]) and same_nodes(source, end.args[0]):
            return None
        return f"%{end.name} writes back %{source.name}, another view of it"
    late = work.aliases.reads(node, end)
    return f"{late[0].text()} after %{end.name} overwrites graph input %{end.args[0].name}" if late else None


def keep(work: GraphWork, node: Node, value: Node, reason: str, *, opaque: bool = False) -> None:
    copied = work.copy(value, node, any_layout=True, opaque=opaque)
    if copied is not None:
        if value is node.args[0]:
            node.args = (copied, *node.args[1:])
        else:
            node.replace_input_with(value, copied)
        work.kept.append(KeptCopy.of(node.name, str(node.target), value, reason))


def drop_self_copies(work: GraphWork) -> None:
    """Erases each `copy_` of an input onto itself.

    They cost a pass over it, and Inductor takes an input for scratch memory as long as some `copy_` overwrites it.
    """
    for node in [n for n in work.graph.nodes if is_op(n, aten.copy_.default)]:
        owner, source = node.args[:2]
        if source is owner or (work.aliases.same(source, owner) and same_nodes(source, owner)):
            work.aliases.forget(node)
            node.replace_all_uses_with(owner)
            work.graph.erase_node(node)


def guard_write_backs(work: GraphWork, homes: dict[Node, Node]) -> None:
    """Copies the source of a `copy_` that reads, elsewhere, the input that it overwrites (see guard_sources).

    `x.index_copy_(0, i, v); x.copy_(x.roll(1, 0))`: the first is written into x, where the second reads it shifted.
    """
    writes = written_args(work.graph)
    for node in [n for n in work.graph.nodes if is_op(n, aten.copy_.default)]:
        owner, source = node.args[:2]
        if homes.get(source) is owner:
            continue  # written in place
        moved_in = [other for other, position in homes.items() if position is owner and other < node]
        since = max([*moved_in, *filter(None, [last_write(work, writes, {}, owner, node)])], default=None)
        shifted = since is not None and reads_elsewhere(work, source, owner, tensor_val(owner), since, moved_in)
        if work.aliases.same(source, owner) or shifted:
            keep(work, node, source, f"it is read from %{owner.name}, which is overwritten", opaque=True)
