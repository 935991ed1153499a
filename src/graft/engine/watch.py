"""What a caller waits for, and how it is woken: a thread by a queue, a coroutine by its event loop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from queue import SimpleQueue

from graft.base.errors import GraftError
from graft.engine.core import Request


class Watch(ABC):
    """Requests of one caller. The driver says what changes and rings; the caller waits and looks.

    A caller that is slow is woken once for all that has happened since it looked. each_token: it wants to know of
    every new token, not of the ends alone.
    """

    def __init__(self, requests: Iterable[Request], each_token: bool = False) -> None:
        self.requests = tuple(requests)
        self.open = set(self.requests)  # of which some sample has not ended
        self.each_token = each_token
        self.error: GraftError | None = None
        self.told = False

    @abstractmethod
    def ring(self) -> None:
        """Wakes the caller; RuntimeError where nobody is there to be woken."""

    def tell(self) -> None:
        if not self.told:
            self.told = True
            self.ring()

    def look(self) -> int:
        """How many requests are open; raises what ended them all."""
        self.told = False  # before looking: what changes from here on rings again
        if self.error is not None:
            raise self.error
        return len(self.open)


class ThreadWatch(Watch):
    """A thread waits; Ctrl-C interrupts it."""

    def __init__(self, requests: Iterable[Request], each_token: bool = False) -> None:
        super().__init__(requests, each_token)
        self.bell: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        self.bell.put(None)

    def wait(self) -> int:
        self.bell.get()
        return self.look()


class TaskWatch(Watch):
    """A coroutine waits, in the event loop in which this is made."""

    def __init__(self, requests: Iterable[Request], each_token: bool = False) -> None:
        super().__init__(requests, each_token)
        self.loop = asyncio.get_running_loop()
        self.bell = asyncio.Event()

    def ring(self) -> None:
        self.loop.call_soon_threadsafe(self.bell.set)

    async def wait(self) -> int:
        await self.bell.wait()
        self.bell.clear()
        return self.look()
