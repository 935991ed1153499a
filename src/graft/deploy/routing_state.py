"""What the router of one process knows. In a module of its own: Ray sends PrefixRouter's as a copy, and there is to
be one state for the router and the gateway that feeds it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

from graft.deploy.policy import PrefixIndex, RouteChoice
from graft.engine.kv.events import Created, from_json

SENT = 65_536  # tickets that are remembered
AWAY = 30.0  # seconds: by then Ray Serve has dropped a replica that is dead, and one that lives may be asked again


class RoutingState:
    """Of one process. The lock is held for less than a millisecond."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.index = PrefixIndex()
        self.sent: OrderedDict[str, str] = OrderedDict()  # ticket -> replica
        self.lost: dict[str, float] = {}  # replica -> when it failed
        self.found = self.asked = self.followed = self.routed = 0

    def note_sent(self, ticket: str, replica: str) -> None:
        with self.lock:
            self.sent[ticket] = replica
            while len(self.sent) > SENT:
                self.sent.popitem(last=False)

    def lose_sent(self, ticket: str) -> tuple[str, ...]:
        """The replica that a request went to failed; its name, where the router came so far."""
        with self.lock:
            replica = self.sent.get(ticket)
        if replica is None:
            return ()
        self.lose(replica)
        return (replica,)

    def lose(self, replica: str) -> None:
        """Nobody is sent there until it is back. Ray Serve names it among the replicas until its own check fails."""
        with self.lock:
            self.lost[replica] = time.monotonic()

    def fit(self, names: Collection[str], avoided: Collection[str]) -> list[str]:
        """Replicas that a request may be sent to. avoided: those that have failed it, which are better than none as
        long as they are not lost. None at all: the request waits for one."""
        with self.lock:
            now = time.monotonic()
            self.lost = {name: since for name, since in self.lost.items() if now - since < AWAY}
            there = [name for name in names if name not in self.lost]
        return [name for name in there if name not in avoided] or there

    def hear(self, news: Mapping[str, list[Mapping[str, Any]] | None]) -> None:
        """What the directory tells of caches. One that begins anew belongs to a replica that is back."""
        with self.lock:
            for replica, told in news.items():
                if told is None:
                    self.index.drop(replica)
                for event in (from_json(dict(one)) for one in told or ()):
                    if isinstance(event, Created):
                        self.lost.pop(replica, None)
                    self.index.apply(replica, event)

    def count(self, choice: RouteChoice) -> None:
        self.found += choice.found
        self.asked += choice.of
        self.followed += choice.followed
        self.routed += 1


STATE = RoutingState()
