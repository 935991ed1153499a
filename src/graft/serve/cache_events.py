"""Events of the key-value cache in the HTTP process: /v1/kv_cache_events, the dashboard, and whoever else reads them.

The engine process tells them once, while somebody reads; what is stored is kept here, so that a reader who comes
later begins with the present state and costs the engine nothing. Every reader has its own numbers, from 0, without
gaps. One that is late loses history, never the state: it gets `lost`, and then the present state.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

from graft.base.errors import GraftError
from graft.engine.kv.events import Created, Event, Lost
from graft.engine.kv.view import CacheView
from graft.serve.protocol import answers

MOST = 65_536  # events that wait to be read


@dataclass(eq=False)
class EventReader:
    view: CacheView = field(default_factory=CacheView)  # all that was told
    bell: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: list[Event] = field(default_factory=list)
    behind: bool = True  # begins with the present state
    missed: int = 0  # events since the last that was read, of a reader that is behind
    next_id: int = 0
    error: GraftError | None = None

    def add(self, events: Sequence[Event], fresh: bool) -> None:
        """fresh: they tell the state from nothing."""
        if fresh or self.behind or len(self.waiting) > MOST:
            dropped = sum(one.count if isinstance(one, Lost) else 1 for one in events)
            self.missed += (len(self.waiting) + dropped) if self.next_id else 0
            self.behind, self.waiting = True, []
        else:
            self.waiting += events
        self.bell.set()

    def fail(self, error: GraftError) -> None:
        self.error = error
        self.bell.set()

    def take(self) -> list[Event]:
        """All that there is, under this reader's numbers."""
        if self.error is not None:
            raise self.error
        found, first = self.waiting, self.next_id
        if self.behind:
            now, lost = time.time(), self.missed
            found = [Lost(first + lost, now, lost, first, first + lost - 1)] if lost else []
            first += lost
            found += (state := self.view.state(first + len(found), now))
            self.behind, self.missed = not state, lost if not state else 0
            if not state:
                return []
        self.waiting, self.next_id = [], first + len(found)
        return [replace(one, event_id=number) for number, one in enumerate(found, first)]

    async def read(self) -> list[Event]:
        """All since the last time; waits for the bell."""
        await self.bell.wait()
        self.bell.clear()
        return self.take()


class CacheFeed:
    """Who reads, and what is stored. ask: tells the engine process to send events under a number, or (None) none."""

    def __init__(self, ask: Callable[[int | None], None]) -> None:
        self.ask = ask
        self.number = 0  # of the present subscription: what still comes of those before is left out
        self.view = CacheView()
        self.readers: set[EventReader] = set()

    def follow(self, reader: EventReader) -> None:
        """From now on until it leaves."""
        if not self.readers:
            self.ask(self.number + 1)
            self.number, self.view = self.number + 1, CacheView()
        reader.view = self.view
        if self.view.created is not None:
            reader.bell.set()
        self.readers.add(reader)

    def leave(self, reader: EventReader) -> None:
        self.readers.discard(reader)
        if not self.readers:
            self.ask(None)

    def take(self, number: int, events: Sequence[Event]) -> None:
        if number != self.number or not self.readers:
            return
        for event in events:
            self.view.apply(event)
        fresh = any(isinstance(event, (Lost, Created)) for event in events)
        for reader in self.readers:
            reader.add(events, fresh)

    def fail(self, error: GraftError) -> None:
        """Every reader ends with the error."""
        for reader in self.readers:
            reader.fail(error)
        self.readers = set()


async def event_stream(feed: CacheFeed, reader: EventReader) -> AsyncGenerator[bytes]:
    """Server-sent events with their kind and number; a comment where the bell rang for nothing. The feed knows the
    reader from the first piece to the last."""
    feed.follow(reader)
    try:
        while True:
            found = [one.to_json() for one in await reader.read()]
            lines = [f"event: {one['type']}\nid: {one['event_id']}\n".encode() + answers.event(one) for one in found]
            yield b"".join(lines) or answers.PING
    finally:
        feed.leave(reader)
