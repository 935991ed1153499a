"""What the caches of all replicas hold, for gateways: replicas tell it their events, gateways ask what is new.

It runs as an actor of Ray. Only names of blocks go through it, no tokens. Whoever comes late or anew, a gateway or
the directory itself, begins with the present state: nobody keeps what is gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graft.base.errors import EventOrder
from graft.engine.kv.events import Created, Event, Stored, from_json
from graft.engine.kv.view import CacheView
from graft.serve.cache_events import EventReader

QUIET = 60.0  # seconds after which a replica that tells nothing, or a gateway that asks nothing, is forgotten
Told = Mapping[str, Any]


def without_tokens(event: Event) -> Told:
    """For the wire: hashes are all that a router asks for."""
    if isinstance(event, Stored):
        event = replace(event, blocks=tuple(replace(block, tokens=()) for block in event.blocks))
    return event.to_json()


@dataclass(eq=False)
class ToldCache:
    metrics: str = ""  # of the replica, as it last told them
    view: CacheView = field(default_factory=CacheView)
    heard: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class Follower:
    bell: asyncio.Event = field(default_factory=asyncio.Event)
    readers: dict[str, EventReader] = field(default_factory=dict)
    asked: float = field(default_factory=time.monotonic)


class CacheDirectory:
    def __init__(self) -> None:
        self.caches: dict[str, ToldCache] = {}
        self.followers: dict[str, Follower] = {}

    async def tell(self, replica: str, told: Sequence[Told], metrics: str = "") -> bool:
        """False: the events do not follow on those that are known here; begin anew. No events: it is still there."""
        events = [from_json(dict(one)) for one in told]
        known = self.caches.get(replica)
        begins = bool(events) and isinstance(events[0], Created) and events[0].event_id == 0
        if known is None or begins:
            if not begins:
                return False
            known = self.caches[replica] = ToldCache()
        known.heard, known.metrics = time.monotonic(), metrics
        try:
            for event in events:
                known.view.apply(event)
        except EventOrder:
            del self.caches[replica]
            return False
        for follower in self.followers.values():
            reader = self.reader(follower, replica, known.view)
            if events:
                reader.add(events, fresh=begins)
        self.forget()
        return True

    def reader(self, follower: Follower, replica: str, view: CacheView) -> EventReader:
        found = follower.readers.get(replica)
        if found is None or found.view is not view:
            found = follower.readers[replica] = EventReader(view, follower.bell)
            follower.bell.set()
        return found

    async def follow(self, gateway: str, patience: float) -> dict[str, list[Told] | None]:
        """What is new, by replica; None: it is gone. Waits for news, at most for so many seconds."""
        follower = self.followers.setdefault(gateway, Follower())
        follower.asked = time.monotonic()
        for name, known in self.caches.items():
            self.reader(follower, name, known.view)
        try:
            await asyncio.wait_for(follower.bell.wait(), patience)
        except TimeoutError:
            self.forget()
            return {}
        follower.bell.clear()
        news: dict[str, list[Told] | None] = {}
        for name, reader in list(follower.readers.items()):
            if name not in self.caches:
                del follower.readers[name]
                news[name] = None
            elif events := reader.take():
                news[name] = [event.to_json() for event in events]
        return news

    async def metrics(self) -> dict[str, str]:
        """Of every replica, as old as its last word."""
        return {name: known.metrics for name, known in self.caches.items()}

    async def leave(self, replica: str) -> None:
        if self.caches.pop(replica, None) is not None:
            for follower in self.followers.values():
                follower.bell.set()

    def forget(self) -> None:
        """A process that was killed says no farewell."""
        now = time.monotonic()
        self.followers = {name: one for name, one in self.followers.items() if now - one.asked < QUIET}
        for name in [name for name, known in self.caches.items() if now - known.heard >= QUIET]:
            del self.caches[name]
            for follower in self.followers.values():
                follower.bell.set()
