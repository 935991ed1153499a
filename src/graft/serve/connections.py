"""Connections on which no request comes are closed: uvicorn waits for ever for the first one, and for the rest of a
head. It is h11's protocol, whatever else is installed: httptools puts no bound on headers."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from graft.serve.metrics import Metrics


class Connection(H11Protocol):
    """slow: seconds that the head of a request may take, from the connection's beginning or from its first byte."""

    def __init__(self, *given: Any, slow: float, metrics: Metrics, **named: Any) -> None:
        super().__init__(*given, **named)
        self.slow, self.metrics = slow, metrics
        self.waiting: asyncio.TimerHandle | None = None  # runs while a head is awaited

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # pyrefly: ignore[bad-argument-type]  # as uvicorn has it
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
