"""Pairs of calls that touch one memory and whose order must be kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch.fx import Graph, Node

from graft.ir.effects import alias_sources, is_mutating, mutated_args, storage_root, written_args
from graft.ir.nodes import outlives_call, output_node, tensor_val, where
from graft.ir.storage import storage_id
from graft.memory.aliases import Aliases
from graft.memory.regions import StorageRegion, apart, covers, region_of

Kind = Literal["read after write", "write after read", "write after write"]


@dataclass(frozen=True)
class Access:
    """`node` reads or writes the memory of a group through one of its arguments."""

    node: Node
    through: Node
    writes: bool
    group: int
    owner: Node  # of the memory
    region: StorageRegion | None  # which part, where that is known


@dataclass(frozen=True)
class Hazard:
    """`second` touches, through its argument `through`, what `first` touched in the memory that `memory` owns."""

    first: Node
    second: Node
    kind: Kind
    memory: Node
    through: Node

    def text(self) -> str:
        return f"{where(self.second)} must stay after {where(self.first)}: {self.kind} of %{self.memory.name}"


def hazards(graph: Graph) -> list[Hazard]:
    """Every such pair, in the order of the second; pairs that follow from others are left out.

    The output counts as a reader of what it returns and of every input and attribute that is written: the caller sees
    them. Parts that are proven to be apart are no hazard. A graph without writes costs a look at each node.
    """
    return conflicts(accesses(graph))


def conflicts(touched: Iterable[Access]) -> list[Hazard]:
    """The hazards among accesses in graph order."""
    found: list[Hazard] = []
    live: dict[int, list[Access]] = {}
    for access in touched:
        earlier = live.setdefault(access.group, [])
        for other in earlier:
            if (access.writes or other.writes) and not apart(access.region, other.region):
                found += [] if other.node is access.node else [hazard(other, access)]
        if access.writes:
            live[access.group] = [other for other in earlier if not hides(access, other)]
        live[access.group].append(access)
    return list(dict.fromkeys(found))


def check_order(graph: Graph, happens_before: Callable[[Node, Node], bool]) -> list[Hazard]:
    """The hazards whose order `happens_before` does not promise."""
    return [hazard for hazard in hazards(graph) if not happens_before(hazard.first, hazard.second)]


def hazard(first: Access, second: Access) -> Hazard:
    kinds: dict[tuple[bool, bool], Kind] = {
        (True, False): "read after write",
        (False, True): "write after read",
        (True, True): "write after write",
    }
    kind = kinds[first.writes, second.writes]
    return Hazard(first.node, second.node, kind, second.owner, second.through)


def hides(write: Access, other: Access) -> bool:
    """Whoever must come after `other` must come after `write`, which itself comes after `other`."""
    return write.region is None or covers(write.region, other.region)


def accesses(graph: Graph) -> Iterator[Access]:
    """Every access, in graph order, to memory that some call writes."""
    writes = written_args(graph)
    if not writes:
        return
    memory = Memory(Aliases(graph, within=[arg for _, arg in writes]))
    for node in graph.nodes:
        into = dict.fromkeys(mutated_args(node)) if is_mutating(node) else {}
        for argument in node.all_input_nodes:
            if argument in memory.aliases and argument not in into and memory.aliases.is_read(node, argument):
                yield memory.access(node, argument, writes=False)
        for argument in into:
            yield memory.access(node, argument, writes=True)
    end = output_node(graph)
    returned = set(end.all_input_nodes)
    for node in graph.nodes:
        if outlives_call(node) and node in memory.aliases and node not in returned:
            yield memory.access(end, node, writes=False)


@dataclass(frozen=True)
class Memory:
    """The written memory of a graph, and the parts of memory that its views cover."""

    aliases: Aliases
    regions: dict[Node, StorageRegion | None] = field(default_factory=dict)

    def group(self, node: Node) -> int:
        return id(self.aliases.group(node))

    def access(self, node: Node, through: Node, *, writes: bool) -> Access:
        return Access(node, through, writes, self.group(through), storage_root(through), self.region(through))

    def region(self, node: Node) -> StorageRegion | None:
        """The part that a view covers, as recorded when the graph was captured.

        What transforms make shares its recorded value with equal calls, which tells nothing of storages. A view whose
        recorded storage is not its owner's was given another source since.
        """
        if node not in self.regions:
            self.regions[node] = self.recorded(node)
        return self.regions[node]

    def recorded(self, node: Node) -> StorageRegion | None:
        tensor, chain = tensor_val(node), [node]
        while sources := alias_sources(chain[-1]):
            chain.append(sources[0])
        if tensor is None or any("made_by" in step.meta for step in chain):
            return None
        values = [tensor_val(step) for step in chain]
        storages = {storage_id(value) if value is not None else None for value in values}
        return region_of(tensor) if len(storages) == 1 else None
