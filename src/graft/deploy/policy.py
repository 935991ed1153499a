"""Which replica a request goes to: where the blocks of its prompt are, as the events of the caches tell.

A request follows its blocks unless the replica that has them is busier than the idlest by more than `slack` requests,
or has less than `least_share` of the prompt: beginnings that all prompts have (a chat template's) attract nobody.
Then it goes where the least is open, and among equals where the least is stored, so that prefixes spread over all
caches.

A block is told of when it has been computed. Until then whoever sent the request there knows it as promised, so that
requests that begin alike and come together go together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graft.base.errors import UsageError
from graft.engine.kv.events import Created, Event, Lost, Removed, Stored
from graft.engine.kv.hashing import block_hash

PROMISES = 16_384  # blocks promised to one replica that are kept
PROMISED_FOR = 256  # decisions that a promise is good for: a request that failed stores nothing


@dataclass(frozen=True)
class RoutePolicy:
    """least_share: of a prompt's whole blocks, for it to follow them. slack: open requests that a replica may have
    more than the idlest one."""

    least_share: float = 0.25
    slack: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.least_share <= 1:
            raise UsageError(f"least_share must be above 0 and at most 1, but is {self.least_share:g}")
        if self.slack < 0:
            raise UsageError(f"slack must be at least 0, but is {self.slack}")


@dataclass(frozen=True)
class RouteChoice:
    """found: blocks of the prompt that the replica has, or was promised; of: whole blocks of the prompt."""

    replica: str
    found: int
    of: int
    followed: bool  # the prefix decided, not the load


@dataclass(eq=False)
class ReplicaBlocks:
    """What one replica's cache holds. root and block_size come with its first event."""

    root: str = ""
    block_size: int = 0
    stored: set[str] = field(default_factory=set)
    promised: OrderedDict[str, int] = field(default_factory=OrderedDict)  # hash -> the decision that promised it

    @property
    def held(self) -> int:
        return len(self.stored) + len(self.promised)

    def has(self, name: str, decision: int) -> bool:
        return name in self.stored or decision - self.promised.get(name, -PROMISED_FOR - 1) <= PROMISED_FOR


class PrefixIndex:
    """What every replica's cache holds, from their events alone. One thread works it."""

    def __init__(self) -> None:
        self.replicas: dict[str, ReplicaBlocks] = {}
        self.decision = 0

    def apply(self, replica: str, event: Event) -> None:
        """Events of one replica in their order; after `lost` its state is told anew, beginning with `created`."""
        if isinstance(event, (Created, Lost)):
            self.drop(replica)
        if isinstance(event, Created):
            self.replicas[replica] = ReplicaBlocks(event.root, event.block_size)
        held = self.replicas.get(replica)
        if held is None:
            return  # its `created` is still to come
        if isinstance(event, Stored):
            names = [block.hash for block in event.blocks]
            held.stored.update(names)
            for name in names:
                held.promised.pop(name, None)
        elif isinstance(event, Removed):
            held.stored.difference_update(event.hashes)

    def drop(self, replica: str) -> None:
        """It is gone, or begins anew."""
        self.replicas.pop(replica, None)

    def choose(self, tokens: Sequence[int], load: Mapping[str, int], policy: RoutePolicy) -> RouteChoice:
        """load: open requests of every replica that may be chosen. What is chosen is promised the prompt's blocks."""
        if not load:
            raise UsageError("no replica is there to be chosen")
        self.decision += 1
        chains = Chains(tokens)
        found = {name: self.found(name, chains) for name in load}
        idlest = min(load.values())
        near = sorted(
            (name for name in load if load[name] <= idlest + policy.slack),
            key=lambda name: (-found[name], load[name], self.held(name), name),
        )
        best = near[0]
        followed = found[best] > 0 and found[best] >= policy.least_share * len(chains.of(self.replicas[best]))
        if not followed:
            best = min(load, key=lambda name: (load[name], self.held(name), name))
        known = self.replicas.get(best)
        chain = [] if known is None else chains.of(known)
        if known is not None:
            self.promise(known, chain)
        return RouteChoice(best, found[best], len(chain), followed)

    def held(self, replica: str) -> int:
        known = self.replicas.get(replica)
        return 0 if known is None else known.held

    def found(self, replica: str, chains: Chains) -> int:
        """Blocks from the beginning on."""
        known = self.replicas.get(replica)
        if known is None:
            return 0
        chain = chains.of(known)
        return next((i for i, name in enumerate(chain) if not known.has(name, self.decision)), len(chain))

    def promise(self, held: ReplicaBlocks, chain: Sequence[str]) -> None:
        for name in chain:
            if name not in held.stored:
                held.promised[name] = self.decision
                held.promised.move_to_end(name)
        while held.promised and (
            len(held.promised) > PROMISES or self.decision - next(iter(held.promised.values())) > PROMISED_FOR
        ):
            held.promised.popitem(last=False)


class Chains:
    """Hashes of a prompt's whole blocks. Replicas of one model have one root; while a deployment is exchanged there
    may be two."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self.made: dict[tuple[str, int], list[str]] = {}

    def of(self, cache: ReplicaBlocks) -> list[str]:
        key = cache.root, cache.block_size
        if key not in self.made:
            self.made[key] = prompt_hashes(self.tokens, *key)
        return self.made[key]


def prompt_hashes(tokens: Sequence[int], root: str, block_size: int) -> list[str]:
    """Of the blocks that a cache could have: one token at least is always computed."""
    names, parent = [], root
    for start in range(0, len(tokens) - block_size, block_size):
        parent = block_hash(parent, tokens[start : start + block_size])
        names.append(parent)
    return names
