"""What every HTTP request needs: a bounded body, errors in OpenAI's shape, and work that ends with its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graft.base.errors import EngineGone, GraftError, HttpRefused, UsageError
from graft.serve.protocol import answers
from graft.serve.protocol.errors import error_event, error_value

T = TypeVar("T")
PING_AFTER = 15.0  # seconds without a token, after which a comment keeps proxies from closing the connection
DISCARDED = 64 << 20  # bytes of a body that is too large which are read before the answer
# what comes with an error; of a body that is too large, nothing more is read after it
HEADERS = {429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}, 413: {"Connection": "close"}}


class ClientGone(Exception):
    """The client has closed its connection."""


class SlowClient(Exception):
    """The client took none of what was sent to it for too long."""


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(answers.encode(value), status, headers, "application/json")


def status_of(error: GraftError) -> int:
    if isinstance(error, (HttpRefused, EngineGone)):
        return error.status
    return 400 if isinstance(error, UsageError) else 500


def error_of(error: GraftError, path: str) -> dict[str, Any]:
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return error_value(path, str(error), status_of(error), param, code)


def error_response(error: GraftError, path: str) -> Response:
    status = status_of(error)
    return json_response(error_of(error, path), status, HEADERS.get(status))


async def read_body(request: HttpRequest, most: int, seconds: float) -> bytes:
    """The body. Of one that is too large the rest is read and thrown away, up to a bound: a client that still sends
    when the connection is closed never sees the answer."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > most + DISCARDED:
        raise too_large(most)
    try:
        async with asyncio.timeout(seconds):
            found, size = await received(request, most)
    except TimeoutError as error:
        raise HttpRefused(f"the body did not come within {seconds:g} seconds", status=408) from error
    if size > most:
        raise too_large(most)
    return found


def too_large(most: int) -> HttpRefused:
    return HttpRefused(f"the body may have {most} bytes (--max-body-size)", status=413, code="body_too_large")


async def received(request: HttpRequest, most: int) -> tuple[bytes, int]:
    """The body, or a part of one that is longer than `most`; and how long it is, or was until we had enough of it."""
    found, size = bytearray(), 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        size += len(message.get("body", b""))
        if size <= most:
            found += message.get("body", b"")
        if not message.get("more_body", False) or size > most + DISCARDED:
            return bytes(found), size


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(work: Awaitable[T], receive: Receive, *others: Awaitable[None]) -> T:
    """The result of `work`, which is cancelled when the client goes away, or another of these raises."""
    task = asyncio.ensure_future(work)
    beside = [asyncio.ensure_future(one) for one in (disconnected(receive), *others)]
    try:
        done, _ = await asyncio.wait((task, *beside), return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        for one in done:
            one.result()
        raise ClientGone
    finally:
        for one in (task, *beside):
            one.cancel()
        await asyncio.gather(task, *beside, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. The response begins with the first of them: what goes wrong before is an error with its own
    status, what goes wrong later is the last event.

    bell: rung when nothing was sent for long, so that `events` gives something, for proxies' sake. slow: seconds
    after which a client that takes nothing is given up; it may be twice as long, since one timer watches all pieces.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], bell: asyncio.Event, slow: float) -> None:
        super().__init__(None, 200, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.events, self.bell, self.slow = events, bell, slow
        self.pieces, self.sending = 0, False
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(self.send_all(send, scope["path"]), receive, self.watch_client(), self.ping())

    async def send_all(self, send: Send, path: str) -> None:
        async with aclosing(self.events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self.send_piece(send, first)
            try:
                async for piece in events:
                    await self.send_piece(send, piece)
            except GraftError as error:
                await self.send_piece(send, error_event(path, error_of(error, path)))
        await send({"type": "http.response.body", "body": b""})

    async def send_piece(self, send: Send, piece: bytes) -> None:
        self.pieces, self.sending = self.pieces + 1, True
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        self.sending = False

    async def watch_client(self) -> None:
        seen = -1
        while not (self.sending and seen == self.pieces):
            seen = self.pieces
            await asyncio.sleep(self.slow)
        raise SlowClient

    async def ping(self) -> None:
        while True:
            seen = self.pieces
            await asyncio.sleep(PING_AFTER)
            if seen == self.pieces:
                self.bell.set()
