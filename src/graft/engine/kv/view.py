"""What is stored in a cache, rebuilt from its events alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from graft.base.errors import EventOrder
from graft.engine.kv.events import Created, Event, Lost, Removed, Stored, StoredBlock, Updated


@dataclass
class SeenBlock:
    """A stored block as events tell of it."""

    parent: str | None
    tokens: tuple[int, ...]
    in_use: bool = True
    level: int = 0


class CacheView:
    """Rebuilds what is stored from events alone. EventOrder: an event that cannot follow on those before it."""

    def __init__(self) -> None:
        self.blocks: dict[str, SeenBlock] = {}
        self.children: Counter[str | None] = Counter()  # stored blocks that follow on a block
        self.created: Created | None = None
        self.next_id = 0
        self.begins = True  # the next event has to be `created`

    @property
    def levels(self) -> tuple[int, ...]:
        return () if self.created is None else self.created.levels

    def state(self, first: int, at: float) -> list[Event]:
        """Events, numbered from `first`, that build this view from nothing; none where it has not begun. A block was
        seen after its parent, and so it is told."""
        if self.created is None or self.begins:
            return []
        runs: list[tuple[str | None, list[StoredBlock]]] = []
        last: str | None = None
        for name, block in self.blocks.items():
            if not runs or block.parent != last:
                runs.append((block.parent, []))
            runs[-1][1].append(StoredBlock(name, block.tokens))
            last = name
        made: list[Event] = [replace(self.created, event_id=first, time=at)]
        made += [Stored(number, at, parent, tuple(run)) for number, (parent, run) in enumerate(runs, first + 1)]
        if unused := tuple(name for name, block in reversed(self.blocks.items()) if not block.in_use):
            made.append(Updated(first + len(made), at, unused, "in_use", True, False))
        if away := tuple(name for name, block in reversed(self.blocks.items()) if block.level):
            made.append(Updated(first + len(made), at, away, "level", 0, 1))
        return made

    def apply(self, event: Event) -> None:
        missing = event.count if isinstance(event, Lost) else 0
        self.must(event, event.event_id == self.next_id + missing, f"the next id is {self.next_id + missing}")
        if isinstance(event, Lost):
            known = event.first == self.next_id and event.last == event.event_id - 1
            self.must(event, known, f"the lost events begin with {self.next_id} and end just before it")
            self.begins = True
        elif isinstance(event, Created):
            self.blocks, self.children, self.created, self.begins = {}, Counter(), event, False
        else:
            self.must(event, not self.begins, "the first event, and the one after `lost`, is `created`")
            self.change(event)
        self.next_id = event.event_id + 1

    def change(self, event: Event) -> None:
        if isinstance(event, Stored):
            self.store(event)
        elif isinstance(event, Removed):
            for name in event.hashes:
                block = self.known(event, name)
                self.must(event, not block.in_use, f"{name} is in use")
                self.must(event, not self.children[name], f"a stored block follows on {name}")
                self.children[block.parent] -= 1
                del self.blocks[name], self.children[name]
        elif isinstance(event, Updated):
            for name in event.hashes:
                self.update(event, self.known(event, name), name)
        else:
            self.must(event, False, "this kind of event is not known")

    def update(self, event: Updated, block: SeenBlock, name: str) -> None:
        if event.what == "in_use":
            self.must(event, block.in_use == event.old != event.new, f"{name} has in_use = {block.in_use}")
            self.must(event, block.level == 0, f"{name} is not on the device")
            block.in_use = bool(event.new)
        elif event.what == "level":
            self.must(event, block.level == event.old != event.new, f"{name} is on level {block.level}")
            self.must(event, event.new in range(len(self.levels)), f"there are {len(self.levels)} levels of memory")
            self.must(event, not block.in_use, f"{name} is in use")
            block.level = int(event.new)
        else:
            self.must(event, False, "only `in_use` and `level` change")

    def store(self, event: Stored) -> None:
        parent = event.parent
        if parent is not None:
            self.must(event, self.known(event, parent).in_use, f"{parent}, which it follows on, is not in use")
        for block in event.blocks:
            self.must(event, block.hash not in self.blocks, f"{block.hash} is stored already")
            self.blocks[block.hash] = SeenBlock(parent, block.tokens)
            self.children[parent] += 1
            parent = block.hash
        self.must(event, len(self.blocks) <= sum(self.levels), f"the cache has {sum(self.levels)} blocks")

    def known(self, event: Event, name: str) -> SeenBlock:
        self.must(event, name in self.blocks, f"{name} is not stored")
        return self.blocks[name]

    def must(self, event: Event, holds: bool, fact: str) -> None:
        if not holds:
            kind = type(event).__name__.lower()
            raise EventOrder(f"{kind} event {event.event_id} cannot come here: {fact}; read all events, in order")
