"""/v1/kv_cache_events: what happens in the key-value cache, to whoever reads it.

Every reader begins with `lost` (all that was before it) and the present state (`created`, `stored`, …); after that
the events go on without gaps. When another reader comes, all get the present state once more, behind a `lost` of 0
or more events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.base.errors import EngineGone, GraftError
from graft.serve.protocol import answers

MOST = 65_536  # events that wait to be read


@dataclass(eq=False)
class EventReader:
    bell: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: list[Mapping[str, Any]] = field(default_factory=list)
    begun: bool = False  # the state that it begins with has come
    error: GraftError | None = None

    def add(self, events: Iterable[Mapping[str, Any]]) -> None:
        """The bound is of what waited before: the present state, which may be longer, comes at once. It replaces what
        waits, which `lost` then counts."""
        if self.error is not None:
            return
        late = len(self.waiting) > MOST
        for event in events:
            if event["type"] == "lost":
                head = self.waiting[0] if self.waiting else event
                first = head.get("first", head["event_id"]) if self.begun else 0
                event = {**event, "count": event["event_id"] - first, "first": first, "last": event["event_id"] - 1}
                self.begun, self.waiting, late = True, [], False
            if self.begun:
                self.waiting.append(event)
                self.bell.set()
        if late:
            self.waiting = []
            self.fail(EngineGone(f"more than {MOST} events wait to be read; read faster, or begin again"))

    def fail(self, error: GraftError) -> None:
        self.error = error
        self.bell.set()

    async def read(self) -> list[Mapping[str, Any]]:
        await self.bell.wait()
        self.bell.clear()
        if self.error is not None:
            raise self.error
        found, self.waiting = self.waiting, []
        return found


async def event_stream(
    reader: EventReader, follow: Callable[[EventReader], None], leave: Callable[[EventReader], None]
) -> AsyncGenerator[bytes]:
    """Server-sent events with their kind and number; a comment where the bell rang for nothing. The engine knows the
    reader from the first piece to the last."""
    try:
        follow(reader)
        while True:
            found = await reader.read()
            lines = [f"event: {one['type']}\nid: {one['event_id']}\n".encode() + answers.event(one) for one in found]
            yield b"".join(lines) or answers.PING
    finally:
        leave(reader)
