"""Bounds of connections. Those on which no request comes are closed: uvicorn waits for ever for the first one, and
for the rest of a head. One more than there are files for is told so; asyncio would print thousands of tracebacks a
second. It is h11's protocol, whatever else is installed: httptools puts no bound on headers."""

from __future__ import annotations

import asyncio
import errno
import resource
import time
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from graft.serve.metrics import Metrics

MOST_FILES = 65_536  # as vLLM: more open connections than anybody serves
KEPT_FILES = 128  # for all that is no connection, and those that are accepted together
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
NO_FILES = (errno.EMFILE, errno.ENFILE)
QUIET = 1.0  # seconds between two lines that there are no files


def room_for_connections() -> int:
    """As many as there may be files; the soft limit, often 1,024, is raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = MOST_FILES if hard == unlimited else min(hard, MOST_FILES)
    if soft != unlimited and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = MOST_FILES if soft == unlimited else soft
    return max(files - KEPT_FILES, files // 2)


class LoopErrors:
    """What the event loop cannot give to anybody. Without files asyncio tries to accept again and again, and tells
    each time: a line a second is enough."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self.tell, self.told, self.times = tell, float("-inf"), 0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in NO_FILES:
            loop.default_exception_handler(context)
            return
        self.times += 1
        if time.monotonic() - self.told >= QUIET:
            self.tell("connections wait", reason=error.strerror, times=self.times)
            self.told, self.times = time.monotonic(), 0


class Connection(H11Protocol):
    """slow: seconds that the head of a request may take, from the connection's beginning or from its first byte.
    most: connections that may be open."""

    def __init__(self, *given: Any, slow: float, most: int, metrics: Metrics, **named: Any) -> None:
        super().__init__(*given, **named)
        self.slow, self.most, self.metrics = slow, most, metrics
        self.waiting: asyncio.TimerHandle | None = None  # runs while a head is awaited

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # pyrefly: ignore[bad-argument-type]  # as uvicorn has it
        if len(self.connections) > self.most:
            self.metrics.refuse(503)
            self.transport.write(FULL)
            self.transport.close()
            return
        self.wait_for_head()

    def data_received(self, data: bytes) -> None:
        """More bytes of a head give it no more time."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.wait_for_head()
        else:
            self.stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_waiting()
        super().connection_lost(exc)

    def wait_for_head(self) -> None:
        if self.waiting is None:
            self.waiting = self.loop.call_later(self.slow, self.give_up)

    def stop_waiting(self) -> None:
        if self.waiting is not None:
            self.waiting.cancel()
            self.waiting = None

    def give_up(self) -> None:
        self.waiting = None
        if not self.transport.is_closing():
            self.metrics.slow_clients += 1
            self.transport.close()
