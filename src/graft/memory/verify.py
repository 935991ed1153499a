"""What a rewrite may not do to memory: the order of reads and writes, and what is written, before and after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import getitem

import torch
from torch.fx import Graph, GraphModule, Node

from graft.base.errors import VerificationError
from graft.ir.edit import attribute
from graft.ir.effects import effects
from graft.ir.nodes import leaves, outlives_call, where
from graft.ir.verify import GraphSnapshot
from graft.memory.hazards import Access, Hazard, accesses, conflicts

aten = torch.ops.aten
OVERWRITING = (aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor)
Rewrites = Iterable[tuple[tuple[str, ...], tuple[str, ...]]]  # names of nodes: replaced, made


@dataclass(frozen=True)
class Uses:
    """Who touches which written memory, and in which order they must; taken before a graph is rewritten."""

    by_node: dict[str, list[Access]]
    hazards: tuple[Hazard, ...]

    @staticmethod
    def take(graph: Graph) -> Uses:
        found = list(accesses(graph))
        by_node: dict[str, list[Access]] = {}
        for access in found:
            by_node.setdefault(access.node.name, []).append(access)
        return Uses(by_node, tuple(conflicts(found)))

    def of(self, name: str, *, writes: bool | None = None) -> list[Access]:
        return [access for access in self.by_node.get(name, ()) if writes in (None, access.writes)]

    def all(self) -> Iterator[Access]:
        return (access for found in self.by_node.values() for access in found)


def check_memory(gm: GraphModule, before: GraphSnapshot, uses: Uses, rewrites: Rewrites) -> None:
    """Raises VerificationError where a rewrite of `before` into `gm` lets somebody see another value in memory.

    1. Accesses to one memory keep their order; those of a replaced node are now made by what took its place.
    2. Whoever reads what a write left read that write's result before, too.
    3. An input or an attribute is written where it was written before, and nowhere else.
    """
    now = Uses.take(gm.graph)
    if not now.by_node and not uses.by_node:
        return
    change = GraphChange.of(gm, before, uses, now, rewrites)
    change.check_written()
    for kept in uses.hazards:
        change.check_kept(kept)
    for found in now.hazards:
        if found.kind != "write after read" and change.reads(found.second, found.through):
            change.check_seen(found)


@dataclass(frozen=True)
class GraphChange:
    """A graph before and after, and which nodes stand for which."""

    gm: GraphModule
    before: GraphSnapshot
    was: Uses
    now: Uses
    present: dict[str, Node]
    made: dict[str, set[str]]  # replaced → made
    origin: dict[str, set[str]]  # made → replaced
    order: dict[str, int]  # before
    groups: dict[str, set[int]]  # owner → memory now

    @staticmethod
    def of(gm: GraphModule, before: GraphSnapshot, was: Uses, now: Uses, rewrites: Rewrites) -> GraphChange:
        present = {node.name: node for node in gm.graph.nodes}
        made: dict[str, set[str]] = {}
        origin: dict[str, set[str]] = {}
        for replaced, new in rewrites:
            for name in replaced:
                made.setdefault(name, set()).update(new)
            for name in new:
                origin.setdefault(name, set()).update(replaced)
        order = {name: index for index, (_, name, *_) in enumerate(before.nodes)}
        groups: dict[str, set[int]] = {}
        for access in now.all():
            groups.setdefault(key(access.owner), set()).add(access.group)
        return GraphChange(gm, before, was, now, present, made, origin, order, groups)

    def survived(self, name: str) -> bool:
        return name in self.order and name in self.present

    def check_written(self) -> None:
        """Inputs and attributes that nobody wrote belong to the caller or are constants; others are state."""
        for access in self.was.all():
            if access.writes and outlives_call(access.owner) and not list(self.stand_ins(access, writes=True)):
                raise VerificationError(f"the write of {where(access.node)} to %{access.owner.name} is lost")
        known = {key(access.owner) for access in self.was.all()}
        of_group: dict[int, set[Node]] = {}
        for access in self.now.all():
            of_group.setdefault(access.group, set()).add(access.owner)
        for access in self.now.all():
            owners = of_group[access.group] if access.writes and access.node.name not in self.order else set()
            if not any(key(owner) in known for owner in owners):
                for owner in sorted(owners):
                    self.check_owner(access.node, owner)

    def check_owner(self, node: Node, owner: Node) -> None:
        if owner.op == "get_attr" and isinstance(attribute(self.gm, str(owner.target)), torch.nn.Parameter):
            raise VerificationError(f"{where(node)} writes to the parameter {owner.target}")
        if outlives_call(owner) and owner.name in self.order:
            raise VerificationError(f"{where(node)} writes to %{owner.name}, which the graph did not write before")

    def check_kept(self, kept: Hazard) -> None:
        """The two stand, or what took their places stands, in the order that they had."""
        first_writes, second_writes = kept.kind != "write after read", kept.kind != "read after write"
        touched = [(kept.first, first_writes), (kept.second, second_writes)]
        firsts, seconds = ([*self.positions(node, kept.memory, writes=writes)] for node, writes in touched)
        for first in firsts:
            for second in seconds:
                if second < first:
                    raise VerificationError(
                        f"{where(second)} now comes before {where(first)}: the {kept.kind} of %{kept.memory.name}"
                        " must keep its order"
                    )

    def stand_ins(self, access: Access, *, writes: bool) -> Iterator[Node]:
        return self.positions(access.node, access.owner, writes=writes)

    def positions(self, node: Node, memory: Node, *, writes: bool) -> Iterator[Node]:
        """`node`, or what was made for it and touches the same memory."""
        if self.survived(node.name):
            yield self.present[node.name]
            return
        groups = self.groups.get(key(memory), set())
        for name in self.made.get(node.name, ()):
            if any(a.group in groups or not groups for a in self.now.of(name, writes=writes)):
                yield self.present[name]

    def reads(self, node: Node, through: Node) -> bool:
        """A write that overwrites all that it covers sees nothing of what was there."""
        return any(a.through is through and not a.writes for a in self.now.of(node.name)) or not overwrites(node)

    def check_seen(self, found: Hazard) -> None:
        if outlives_call(found.memory) and found.memory.name not in self.order:
            return  # a new input: nobody knew another value of it
        writes = self.olds(found.first)
        for reader in self.olds(found.second):
            if any(self.saw(name, reader) for name in writes):
                return
            if any(self.derives(old, writes) for old in self.old_arguments(reader, found)):
                return
            if any(self.derives(old, writes) for old in self.copied_before(reader, found)):
                return
        raise VerificationError(
            f"{where(found.first)} overwrites %{found.memory.name}, which {where(found.second)} still reads"
        )

    def olds(self, node: Node) -> set[str]:
        """What `node` was, or stands for; one that no rewrite names may stand for anything that is gone."""
        if node.name in self.order:
            return {node.name}
        return self.origin.get(node.name) or {name for name in self.order if name not in self.present}

    def saw(self, write: str, reader: str) -> bool:
        """Before, `reader` looked at one memory after `write`; to overwrite all of it is not to look at it."""
        groups = {a.group for a in self.was.of(write, writes=True)}
        blind = self.before.calls[reader][0] in OVERWRITING
        looks = any(a.group in groups and not (a.writes and blind) for a in self.was.of(reader))
        return looks and self.order[write] < self.order[reader]

    def old_arguments(self, reader: str, found: Hazard) -> Iterator[Node]:
        """What `reader` took, before, where it now takes the memory in question."""
        target, args, kwargs = self.before.calls[reader]
        old = list(leaves((args, kwargs)))
        new = list(leaves((found.second.args, found.second.kwargs)))
        same_call = reader == found.second.name and len(old) == len(new)
        for index, value in enumerate(old):
            if index == 0 and target in OVERWRITING:
                continue  # what it writes to it does not read
            if isinstance(value, Node) and (not same_call or new[index] is found.through):
                yield value

    def copied_before(self, reader: str, found: Hazard) -> Iterator[Node]:
        """What had been copied into the memory in question when `reader`, before, looked at it."""
        for was in self.was.hazards:
            if was.second.name == reader and was.kind == "read after write" and key(was.memory) == key(found.memory):
                target, args, _ = self.before.calls[was.first.name]
                if target is aten.copy_.default and isinstance(args[1], Node):
                    yield args[1]

    def derives(self, value: Node, writes: set[str]) -> bool:
        """`value` was, or was a view or an update of, the result of one of `writes`."""
        while True:
            if value.name in writes:
                return True
            target, args, _ = self.before.calls[value.name]
            follows = value.name in self.made or is_view(target)
            if not (follows and args and isinstance(args[0], Node)):
                return False
            value = args[0]


def key(owner: Node) -> str:
    """The same for every node that reads one attribute."""
    return f"{owner.op}:{owner.target}" if owner.op == "get_attr" else owner.name


def is_view(target: object) -> bool:
    return target is getitem or any(effects(target).results)


def overwrites(node: Node) -> bool:
    """Gives every element of what it writes a new value that does not depend on the old one."""
    return node.target in OVERWRITING
