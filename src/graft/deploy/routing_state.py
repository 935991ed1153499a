"""What the router of one process knows. In a module of its own: Ray sends PrefixRouter's as a copy, and there is to
be one state for the router and the gateway that feeds it."""

from __future__ import annotations

import threading
from collections import OrderedDict

from graft.deploy.policy import PrefixIndex, RouteChoice

SENT = 65_536  # tickets that are remembered


class RoutingState:
    """Of one process. The lock is held for less than a millisecond."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.index = PrefixIndex()
        self.sent: OrderedDict[str, str] = OrderedDict()  # ticket -> replica
        self.found = self.asked = self.followed = self.routed = 0

    def note_sent(self, ticket: str, replica: str) -> None:
        with self.lock:
            self.sent[ticket] = replica
            while len(self.sent) > SENT:
                self.sent.popitem(last=False)

    def count(self, choice: RouteChoice) -> None:
        self.found += choice.found
        self.asked += choice.of
        self.followed += choice.followed
        self.routed += 1


STATE = RoutingState()
