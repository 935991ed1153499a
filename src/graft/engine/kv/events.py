"""What happens in the cache, told to whoever wants to know: a router, a dashboard, a test.

Events are numbered from 0 without gaps. The queue keeps a bounded backlog; a reader that comes too late loses
history, never the state: it gets `Lost` and then events that build the present state from nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from graft.base.errors import CacheMisuse
from graft.engine.kv.hashing import CachedBlock

Record = tuple[
    Callable[..., "Event"], Sequence[Any]
]  # an event that nobody has asked for yet: how to make it, of what


def shortened(hashes: Iterable[str]) -> str:
    return ", ".join(name[:8] for name in hashes)


@dataclass(frozen=True)
class Event:
    event_id: int
    time: float  # unix seconds

    def describe(self) -> str:
        """For people; hashes are shortened."""
        return str(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """One JSON object: `type` and the fields."""
        return {"type": type(self).__name__.lower(), **vars(self)}


@dataclass(frozen=True)
class Created(Event):
    """The cache is there and holds nothing."""

    levels: tuple[int, ...]  # blocks of each level of memory: the device's, and the host's where there is one
    block_size: int
    root: str  # the hash that first blocks follow on

    def describe(self) -> str:
        host = f", and {self.levels[1]} in host memory" if len(self.levels) > 1 else ""
        return f"{self.levels[0]} blocks of {self.block_size} tokens{host}"

    @staticmethod
    def of(event_id: int, at: float, facts: Sequence[Any]) -> Created:
        ((levels, block_size, root),) = facts
        return Created(event_id, at, levels, block_size, root)


@dataclass(frozen=True)
class StoredBlock:
    hash: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Stored(Event):
    """Blocks that can be found now and are in use. The first follows on `parent` (None: the root), the next on it."""

    parent: str | None
    blocks: tuple[StoredBlock, ...]

    def describe(self) -> str:
        after = f"after {self.parent[:8]}" if self.parent else "at the start of a sequence"
        return f"{shortened(block.hash for block in self.blocks)} {after}"

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "blocks": [vars(block) for block in self.blocks]}

    @staticmethod
    def of(event_id: int, at: float, entries: Sequence[CachedBlock]) -> Stored:
        parent = entries[0].parent
        blocks = tuple(StoredBlock(entry.hash, entry.tokens) for entry in entries)
        return Stored(event_id, at, None if parent is None else parent.hash, blocks)


@dataclass(frozen=True)
class Removed(Event):
    """Blocks that were evicted, children before their parents."""

    hashes: tuple[str, ...]

    def describe(self) -> str:
        return shortened(self.hashes)

    @staticmethod
    def of(event_id: int, at: float, entries: Sequence[CachedBlock]) -> Removed:
        return Removed(event_id, at, tuple(entry.hash for entry in entries))


@dataclass(frozen=True)
class Updated(Event):
    """Stored blocks of which `what` went from `old` to `new`: `in_use`, whether a sequence has them, or `level`, the
    memory that they lie in: 0 the device's, 1 the host's."""

    hashes: tuple[str, ...]
    what: str
    old: bool | int
    new: bool | int

    def describe(self) -> str:
        return f"{shortened(self.hashes)}: {self.what} {self.old} → {self.new}"

    @staticmethod
    def used(event_id: int, at: float, entries: Sequence[CachedBlock]) -> Updated:
        return Updated(event_id, at, tuple(entry.hash for entry in entries), "in_use", False, True)

    @staticmethod
    def unused(event_id: int, at: float, entries: Sequence[CachedBlock]) -> Updated:
        return Updated(event_id, at, tuple(entry.hash for entry in entries), "in_use", True, False)

    @staticmethod
    def offloaded(event_id: int, at: float, entries: Sequence[CachedBlock]) -> Updated:
        return Updated(event_id, at, tuple(entry.hash for entry in entries), "level", 0, 1)

    @staticmethod
    def reloaded(event_id: int, at: float, entries: Sequence[CachedBlock]) -> Updated:
        return Updated(event_id, at, tuple(entry.hash for entry in entries), "level", 1, 0)


@dataclass(frozen=True)
class Lost(Event):
    """Events `first` to `last` were dropped because nobody took them in time. The present state follows."""

    count: int
    first: int
    last: int

    def describe(self) -> str:
        return f"{self.count} events, {self.first} to {self.last}"


def from_json(data: dict[str, Any]) -> Event:
    """The event that `to_json` wrote, also after a way through JSON."""
    kinds: dict[str, type[Event]] = {"created": Created, "stored": Stored, "removed": Removed}
    kinds |= {"updated": Updated, "lost": Lost}
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k != "type"}
    if "blocks" in fields:
        fields["blocks"] = tuple(StoredBlock(block["hash"], tuple(block["tokens"])) for block in fields["blocks"])
    return kinds[data["type"]](**fields)


class EventQueue:
    """A backlog that tells of at most `limit` blocks. Any thread may drain it.

    A record is a few words until it is drained. Once the limit is passed the backlog is dropped, and until the next
    drain events are only counted: a queue that nobody reads costs next to nothing.
    """

    def __init__(self, limit: int = 65536, lock: Any = None) -> None:
        """`lock`: of the queue that this one is a branch of."""
        if limit < 1:
            raise CacheMisuse(f"an event queue with a limit of {limit}; it must be at least 1")
        self.limit = limit
        self.lock = lock or threading.RLock()  # the manager holds it while it changes what is stored
        self.branches: list[EventQueue] = []
        self.filled = threading.Condition(self.lock)
        self.snapshot: Callable[[], list[Record]] = list
        self.backlog: deque[tuple[float, Record]] = deque()
        self.told = 0  # blocks that the backlog tells of
        self.next_id = 0
        self.first_id = 0  # of those that were not drained
        self.lost = False  # the backlog was dropped
        self.waiting = 0  # readers
        self.woken = False  # readers wait no more

    def attach(self, snapshot: Callable[[], list[Record]]) -> None:
        """From now on the queue tells of the cache with this snapshot, beginning with `created`."""
        with self.lock:
            self.snapshot = snapshot
            for make, content in snapshot():
                self.put(make, content)

    def branch(self) -> EventQueue:
        """A second reader: it gets the present state, then every event, whoever drains this queue."""
        with self.lock:
            made = EventQueue(self.limit, self.lock)
            made.attach(self.snapshot)
            self.branches.append(made)
            return made

    def forgo(self) -> None:
        """Nobody drains this queue, only its branches: it keeps nothing, as after its limit, until somebody does."""
        with self.lock:
            self.lost, self.told = True, 0
            self.backlog.clear()

    def drop(self, branch: EventQueue) -> None:
        with self.lock:
            self.branches = [other for other in self.branches if other is not branch]

    def wake(self) -> None:
        """Whoever waits looks again."""
        with self.lock:
            self.woken = True
            self.filled.notify_all()

    def put(self, make: Callable[..., Event], content: Sequence[Any]) -> None:
        with self.lock:
            for branch in self.branches:
                branch.put(make, content)
            self.next_id += 1
            if self.waiting:
                self.filled.notify_all()
            if self.lost:
                return
            self.told += len(content)
            if self.told > self.limit:
                self.lost, self.told = True, 0
                self.backlog.clear()
            else:
                self.backlog.append((time.time(), (make, content)))

    def wait(self, timeout: float) -> None:
        self.waiting += 1
        try:
            self.filled.wait_for(
                lambda: self.woken or self.lost or self.next_id > self.first_id, min(timeout, threading.TIMEOUT_MAX)
            )
        finally:
            self.waiting -= 1

    def drain(self, timeout: float | None = None) -> list[Event]:
        """All events since the last drain. With a timeout, waits up to that many seconds for at least one."""
        with self.lock:
            if timeout is not None:
                self.wait(timeout)
            events: list[Event] = []
            records, first = list(self.backlog), self.first_id
            if self.lost:
                now = time.time()
                events = [Lost(self.next_id, now, self.next_id - first, first, self.next_id - 1)]
                first = self.next_id + 1
                records = [(now, record) for record in self.snapshot()]
                self.next_id = first + len(records)
            self.first_id = self.next_id
            self.backlog.clear()
            self.told, self.lost = 0, False
        events += [make(first + i, at, content) for i, (at, (make, content)) in enumerate(records)]
        return events
