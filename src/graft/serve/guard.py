"""Round every request: who may ask, errors in OpenAI's shape, the end of the engine's work, and one line of log."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graft.base.errors import GraftError, HttpRefused
from graft.serve.embedding import Embedding
from graft.serve.generation import Generation, new_id
from graft.serve.http import ClientGone, SlowClient, error_response, json_response, status_of
from graft.serve.logs import print_traceback
from graft.serve.protocol.errors import error_value, of_messages
from graft.serve.state import ServerState

OPEN = {
    "/",
    "/dashboard",
    "/health",
    "/ready",
    "/version",
    "/metrics",
}  # without a key: probes, scrapers and browsers have none
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(eq=False)
class Exchange:
    """One request and its response."""

    scope: Scope
    receive: Receive
    send_on: Send
    id: str
    began: float = field(default_factory=time.monotonic)
    status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            names = (b"x-request-id", b"request-id")[: 1 + of_messages(self.scope["path"])]  # Anthropic's name, too
            message["headers"] = [*message["headers"], *((name, self.id.encode()) for name in names)]
        await self.send_on(message)


class Guard:
    """Plain ASGI: Starlette's own middleware hides from a handler that its client is gone."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self.app, self.state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        exchange = Exchange(scope, receive, send, given.decode() if REQUEST_ID.fullmatch(given) else new_id())
        scope["state"] = {"request_id": exchange.id}
        scope["app"] = self  # so that the router raises what it does not find
        ended: str | None = "cancelled"
        try:
            ended = await self.serve(exchange, headers)
        finally:
            self.close(exchange, ended)

    async def serve(self, exchange: Exchange, headers: Mapping[bytes, bytes]) -> str | None:
        """How it ended, where it did not end well."""
        scope, receive, send = exchange.scope, exchange.receive, exchange.send
        try:
            keys = headers.get(b"authorization", b""), headers.get(b"x-api-key", b"")
            if scope["path"] not in OPEN and not self.state.keys.allow(*keys):
                raise HttpRefused("the API key is missing or wrong", status=401, code="invalid_api_key")
            await self.app(scope, receive, send)
        except ClientGone:
            return "client gone"
        except SlowClient:
            self.state.metrics.slow_clients += 1
            return "slow client"  # the response is not whole, so uvicorn closes the connection
        except HTTPException as error:
            told = f"{scope['method']} {scope['path']}: {error.detail}"
            value, more = error_value(scope["path"], told, error.status_code), dict(error.headers or {})
            await json_response(value, error.status_code, more)(scope, receive, send)
        except GraftError as error:
            self.state.metrics.refuse(status_of(error))
            await error_response(error, scope["path"])(scope, receive, send)
            return getattr(error, "code", None) or type(error).__name__
        except Exception as error:  # noqa: BLE001  one request fails, the server goes on
            print_traceback()
            if exchange.status is None:
                told = f"{type(error).__name__}: this is a defect; the server's log has more"
                await json_response(error_value(scope["path"], told, 500), 500)(scope, receive, send)
            return type(error).__name__
        return None

    def close(self, exchange: Exchange, ended: str | None) -> None:
        """Work that nobody waits for any more is aborted."""
        made, seconds = exchange.scope["state"].get("generation"), time.monotonic() - exchange.began
        values: dict[str, object] = {}
        if isinstance(made, (Generation, Embedding)) and made.ticket is not None:
            self.state.link.close(made.ticket)
            first = made.ticket.first_token
            values = {
                "prompt_tokens": sum(map(len, made.prompts)),
                "tokens": sum(made.ticket.lengths.values()),
                "finish": made.finish_reasons or None,
                "first_token_s": None if first is None else round(first, 4),
            }
        if values or ended is not None:
            self.state.log(
                "request", id=exchange.id, path=exchange.scope["path"], status=exchange.status,
                seconds=round(seconds, 4), **values, ended=ended,
            )  # fmt: skip
