"""Where clients arrive: encodes the prompt, lets the router choose a replica, and hands its answer on.

An answer begins when its first piece is here. Until then a replica that dies costs the client nothing: another one is
asked. Afterwards a stream ends with an error event, as that of a single server does.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from graft.base.errors import EngineGone, GraftError, HttpRefused, ReplicaLost
from graft.deploy.names import directory_actor, this_replica
from graft.deploy.routing_state import STATE
from graft.deploy.spec import AppSpec
from graft.serve.generation import CHATS, cut_prompt, new_id
from graft.serve.http import ClientGone, error_of, error_response, read_body
from graft.serve.keys import ApiKeys
from graft.serve.protocol import requests, token_requests, values
from graft.serve.protocol.errors import error_event
from graft.serve.protocol.sampling import prompt_room
from graft.serve.protocol.truncation import cut
from graft.serve.text import ServedText
from graft.serve.wire import ServedModel

SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client")
PATIENCE = 10.0  # seconds that the directory may have no news
AGAIN = 0.2  # seconds until a directory that is gone is asked again, or a request is tried anew
EVENTS = b"text/event-stream"


@dataclass(eq=False)
class Begun:
    """An answer of which the first piece is here."""

    status: int
    headers: list[tuple[bytes, bytes]]
    first: bytes
    rest: Any  # Ray's generator of pieces
    ticket: str = ""  # by which the router knows where it is computed

    @property
    def streams(self) -> bool:
        return any(name.lower() == b"content-type" and value.startswith(EVENTS) for name, value in self.headers)


class Gateway:
    async def __init__(self, engine: Any, spec: AppSpec) -> None:
        self.engine, self.spec, self.options = engine, spec, spec.serve
        self.ask = engine.options(stream=True, method_name="ask")
        self.keys = ApiKeys(self.options.api_key, self.options.api_key_file)
        self.model = ServedModel(**await engine.describe.remote())
        self.text = await asyncio.to_thread(
            ServedText, self.model, self.options.tool_call_parser, self.options.reasoning_parser
        )
        self.retries = self.lost = 0
        self.directory = directory_actor(spec.name)
        self.following = asyncio.create_task(self.follow_caches())

    async def __call__(self, http: HttpRequest) -> Response:
        if http.url.path == "/metrics":
            return Response(await self.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")
        try:
            body = await read_body(http, self.options.max_body_size, self.options.slow_client_timeout)
            scope = {name: http.scope[name] for name in SCOPE if name in http.scope}
            tokens = await self.prompt(http, body)
            begun = await self.begin(scope, body, tokens)
        except GraftError as error:
            return error_response(error, http.url.path)
        except ClientGone:
            return Response(status_code=499)
        made = StreamingResponse(self.pieces(begun, http.url.path), begun.status)
        made.raw_headers = [pair for pair in begun.headers if pair[0].lower() != b"x-request-id"]  # Ray Serve adds it
        return made

    async def prompt(self, http: HttpRequest, body: bytes) -> list[int]:
        """The tokens that caches know it by; none where it is no prompt, or none that a replica would take: that one
        says why."""
        if not self.keys.allow(*(http.headers.get(name, "").encode() for name in ("authorization", "x-api-key"))):
            return []
        names = self.options.names
        with suppress(GraftError):
            if http.url.path == "/v1/completions":
                asked = requests.completion(values.parse_json(body), names, self.model.vocabulary)
                first = asked.prompts[0]
                ids = await self.text.encode(first) if isinstance(first, str) else first
                return cut(asked.truncation, ids, prompt_room(asked.params, self.model))
            if http.url.path == token_requests.PATH:
                given = token_requests.token_request(values.parse_json(body), names, self.model.vocabulary)
                return cut(given.truncation, list(given.prompt), prompt_room(given.params, self.model))
            if (read := CHATS.get(http.url.path)) is not None:
                return await cut_prompt(read(values.parse_json(body), names), self.text, self.model)
        return []

    async def begin(self, scope: dict[str, Any], body: bytes, tokens: list[int]) -> Begun:
        """Tries replicas until one has begun to answer, or has refused. Nobody asks one that failed until it is
        back."""
        avoid: list[str] = []
        for attempt in range(self.spec.attempts):
            ticket = new_id()
            answer = self.ask.remote(
                scope, body, tokens=array("I", tokens).tobytes(), avoid=tuple(avoid), ticket=ticket
            )
            try:
                status, headers, _ = await anext(answer)
                begun = Begun(status, headers, await anext(answer, b""), answer, ticket)
            except asyncio.CancelledError:
                answer.cancel()  # the client is gone
                raise
            except (RayError, RayServeException) as error:
                self.must_be_lost(error)
                await asyncio.sleep(AGAIN * attempt)
            else:
                if status != EngineGone.status or attempt + 1 == self.spec.attempts:
                    return begun
            self.retries += 1
            avoid += STATE.lose_sent(ticket)
        raise ReplicaLost(self.spec.attempts)

    def must_be_lost(self, error: Exception) -> None:
        """The replica is gone; anything else is told as what it is."""
        if isinstance(error, BackPressureError):
            raise HttpRefused("the queue is full; try again later", status=429, code="queue_full") from error
        if isinstance(error, DeploymentUnavailableError):
            raise EngineGone("no replica can be started; see the logs of Ray Serve") from error
        if isinstance(error, (RayTaskError, TaskCancelledError)):
            raise error

    async def pieces(self, begun: Begun, path: str) -> AsyncGenerator[bytes]:
        try:
            yield begun.first
            async for piece in begun.rest:
                yield piece
        except (RayError, RayServeException) as error:
            self.must_be_lost(error)
            STATE.lose_sent(begun.ticket)
            if not begun.streams:
                raise
            self.lost += 1
            yield error_event(path, error_of(ReplicaLost(1), path))
        finally:
            begun.rest.cancel()  # where the client has left; one that is over takes no notice

    async def follow_caches(self) -> None:
        """What the replicas' caches hold, from the directory into the router's index."""
        name = this_replica()
        while True:
            try:
                news = await self.directory.follow.remote(name, PATIENCE)
            except RayError:
                await asyncio.sleep(AGAIN)
                continue
            STATE.hear(news)

    async def metrics(self) -> str:
        """This gateway's own, and those of every replica with its name as a label."""
        with STATE.lock:
            counts = {
                "graft:gateway_routed_total": STATE.routed,
                "graft:gateway_followed_prefix_total": STATE.followed,
                "graft:gateway_prompt_blocks_total": STATE.asked,
                "graft:gateway_prompt_blocks_found_total": STATE.found,
                "graft:gateway_retries_total": self.retries,
                "graft:gateway_streams_lost_total": self.lost,
            }
        texts: dict[str, str] = {}
        with suppress(RayError):  # it is being started again
            texts = await self.directory.metrics.remote()
        own = [f"# TYPE {name} counter\n{name} {value}" for name, value in counts.items()]
        return "\n".join([*own, *merged(texts.items())]) + "\n"

    async def __del__(self) -> None:
        if hasattr(self, "following"):
            self.following.cancel()


def merged(texts: Iterable[tuple[str, str]]) -> list[str]:
    """Prometheus wants all of one name together."""
    groups: dict[str, list[str]] = {}
    for replica, text in texts:
        kind = ""
        for line in text.splitlines():
            if line.startswith("#"):
                kind = line
                groups.setdefault(kind, [])
            else:
                name, brace, rest = line.partition("{")
                groups.setdefault(kind, []).append(f'{name}{brace}replica="{replica}",{rest}')
    return [line for kind, lines in groups.items() for line in (kind, *lines)]


def gateway_deployment(**options: Any) -> Any:
    return serve.deployment(Gateway, name="Gateway", **options)
