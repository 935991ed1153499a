"""One engine of an application: what `graft serve` serves, asked by a gateway instead of a socket."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ray import serve
from ray.exceptions import RayError
from starlette.types import Message, Scope

from graft.base.errors import EngineGone
from graft.deploy.directory import without_tokens
from graft.deploy.names import directory_actor, this_replica
from graft.dist.launcher import OWN
from graft.serve.app import make_app
from graft.serve.cache_events import EventReader
from graft.serve.keep import EngineKeeper
from graft.serve.options import ServeOptions

HEARTBEAT = 2.0  # seconds after which a replica whose cache does not change says that it is there
AGAIN = 0.5  # seconds until a directory that is gone is looked for


class EngineReplica:
    async def __init__(self, options: ServeOptions, application: str) -> None:
        os.environ[OWN] = "none"  # it starts its ranks itself, also where srun started Ray
        self.keeper, self.name = EngineKeeper(options), this_replica()
        self.app, self.application = make_app(self.keeper.state), application
        self.warm = asyncio.Event()
        self.keeper.told_ready = lambda _: self.warm.set()  # type: ignore[method-assign]
        self.keeping = asyncio.create_task(self.keeper.keep_engine())
        warm = asyncio.create_task(self.warm.wait())
        await asyncio.wait((self.keeping, warm), return_when=asyncio.FIRST_COMPLETED)
        if self.keeping.done():
            self.keeping.result()  # raises why
        self.telling = asyncio.create_task(self.tell_events())

    async def check_health(self) -> None:
        """Ray Serve replaces a replica that raises."""
        alive, told = self.keeper.state.health()
        if not alive:
            raise EngineGone(f"the engine is {told['status']}: {told.get('reason', 'no step for too long')}")

    async def describe(self) -> dict[str, Any]:
        """The model, for a gateway's tokenizer."""
        _, model = self.keeper.state.loaded
        return asdict(model)

    async def ask(self, scope: Scope, body: bytes, **_: Any) -> AsyncGenerator[tuple[int, list[Any], str] | bytes]:
        """Status, headers and this replica's name, then the body in pieces. Other arguments are the router's."""
        out: asyncio.Queue[Message | None] = asyncio.Queue()
        given: asyncio.Queue[Message] = asyncio.Queue()  # nothing follows on the body: who leaves cancels the task
        given.put_nowait({"type": "http.request", "body": body, "more_body": False})
        task = asyncio.ensure_future(self.app(dict(scope), given.get, out.put))
        task.add_done_callback(lambda _: out.put_nowait(None))
        try:
            while (message := await out.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], list(message["headers"]), self.name
                elif piece := message.get("body", b""):
                    yield piece
            await task  # raises what it ended with
        finally:
            task.cancel()

    def metrics(self) -> str:
        state = self.keeper.state
        return state.metrics.text(state.options.names[0], state.link.load, state.log.lost)

    async def tell_events(self) -> None:
        """The directory hears of every event; it is told anew where it was gone, and where events were lost."""
        while True:
            reader = EventReader()
            try:
                self.keeper.link.cache.follow(reader)
                await self.tell_while_known(reader)
            except (RayError, EngineGone):
                await asyncio.sleep(AGAIN)
            finally:
                self.keeper.link.cache.leave(reader)

    async def tell_while_known(self, reader: EventReader) -> None:
        directory = directory_actor(self.application)
        known = True
        while known or not reader.next_id:
            events = []
            with suppress(TimeoutError):
                events = await asyncio.wait_for(reader.read(), HEARTBEAT)
            told = [without_tokens(one) for one in events]
            known = await directory.tell.remote(self.name, told, self.metrics())

    async def __del__(self) -> None:
        """Ray Serve calls it after the last answer."""
        for name in ("telling", "keeping"):
            if hasattr(self, name):  # it may never have come so far
                getattr(self, name).cancel()
        with suppress(RayError):
            await directory_actor(self.application).leave.remote(self.name)
        self.keeper.state.draining = True
        await self.keeper.link.stop()
        self.keeper.log.flush(1.0)


def engine_deployment(**options: Any) -> Any:
    return serve.deployment(EngineReplica, name="EngineReplica", **options)
