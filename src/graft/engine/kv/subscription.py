"""Events of the cache by callback: a thread that hands each batch of events to a function, in order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from graft.engine.kv.events import Event, EventQueue

log = logging.getLogger("graft")
LOOK = 0.2  # seconds after which the thread looks whether it was closed


class EventSubscription:
    """Calls `callback(events)` from a thread of its own, with all events since the last call, the oldest first.

    It begins with `created` and the present state, has a backlog of its own (a slow callback gets `Lost`, as a late
    reader does), and takes nothing from pollers. What the callback raises ends it, and `close` raises it again.
    """

    def __init__(self, queue: EventQueue, callback: Callable[[list[Event]], Any]) -> None:
        self.queue, self.callback = queue, callback
        self.error: BaseException | None = None
        self.own = queue.branch()
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self.deliver, name="graft-kv-events", daemon=True)
        self.thread.start()

    def deliver(self) -> None:
        closing = False
        try:
            while not closing:
                closing = self.closing.is_set()  # what came before it is still delivered
                events = self.own.drain(0 if closing else LOOK)
                if events:
                    self.callback(events)
        except BaseException as error:  # SystemExit too: `close` raises it again
            self.error = error
            log.exception("a callback of key-value cache events failed, and is not called again")
        finally:
            self.queue.drop(self.own)

    def end(self) -> None:
        """The thread delivers what is left, and ends."""
        self.closing.set()
        self.own.wake()

    def close(self) -> None:
        """Delivers what is left, and waits for the thread's end."""
        self.end()
        if threading.current_thread() is not self.thread:
            self.thread.join()
        if self.error is not None:
            raise self.error

    def __enter__(self) -> EventSubscription:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
