"""The life of the HTTP process: bind, start the engine, serve, drain, end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from graft.base.errors import EngineGone, UsageError
from graft.serve.app import make_app
from graft.serve.connections import Connection, LoopErrors, room_for_connections
from graft.serve.keep import EngineKeeper
from graft.serve.link import EngineLink
from graft.serve.options import ServeOptions
from graft.serve.wire import ServedModel

if TYPE_CHECKING:
    from graft.serve.publisher import EventPublisher

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CLOSING = 5  # seconds that connections have to end after the last answer
UVICORN: dict[str, Any] = {
    "lifespan": "off", "log_config": None, "access_log": False, "server_header": False, "ws": "none",
    "timeout_graceful_shutdown": CLOSING, "backlog": 2048, "proxy_headers": False,  # nobody reads where one came from
}  # fmt: skip
POLL = 0.02  # seconds between two looks at whether all is answered


class QuietServer(uvicorn.Server):
    """uvicorn without its own idea of signals: the first drains, the second ends."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Serving(EngineKeeper):
    """One server from start to end; `main` gives the exit code."""

    def __init__(self, options: ServeOptions) -> None:
        super().__init__(options)
        self.socket = listening(options.host, options.port)
        self.url = url_of(self.socket, "http" if options.ssl_certfile is None else "https")
        self.publisher = publisher_of(options, self.link)
        connection: Any = partial(
            Connection, slow=options.slow_client_timeout, most=room_for_connections(), metrics=self.state.metrics
        )
        self.server = QuietServer(uvicorn.Config(make_app(self.state), http=connection, **UVICORN, **tls(options)))

    async def main(self) -> int:
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # what matters is in our own lines
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopErrors(self.log))
        for number in SIGNALS:
            loop.add_signal_handler(number, self.on_signal, number)
        http = asyncio.create_task(self.server.serve(sockets=[self.socket]))
        engine = asyncio.create_task(self.keep_engine())
        over = asyncio.create_task(self.over.wait())
        published = [asyncio.create_task(self.publisher.run())] if self.publisher is not None else []
        try:
            await asyncio.wait((http, engine, over), return_when=asyncio.FIRST_COMPLETED)
            if engine.done() and not self.over.is_set():
                engine.result()
            return 0
        finally:
            await self.link.stop()
            for task in (engine, *published):
                task.cancel()
            self.server.should_exit = True
            await asyncio.gather(http, engine, *published, return_exceptions=True)
            self.log("ended")
            self.log.flush()

    def told_ready(self, model: ServedModel) -> None:
        self.log("ready", url=self.url, model=self.options.names[0], max_model_len=model.context)
        if not self.options.json_logs:
            print(f"graft serve: ready at {self.url}/v1 (model {self.options.names[0]})", flush=True)

    def on_signal(self, number: int) -> None:
        if self.state.draining:
            self.log("ended at once", signal=signal.Signals(number).name)
            self.log.flush(0.2)
            if self.link.process is not None and self.link.process.returncode is None:
                self.link.process.kill()
            os._exit(128 + number)
        self.state.draining = True
        self.log("draining", signal=signal.Signals(number).name, open=self.link.open)
        self.draining = asyncio.create_task(self.drain())

    async def drain(self) -> None:
        """Open requests go on, new ones are refused; what has not ended in time is told so."""
        try:
            async with asyncio.timeout(self.options.drain_timeout):
                while self.link.tickets:
                    await asyncio.sleep(POLL)
        except TimeoutError:
            self.log("drain timeout", open=self.link.open)
            self.link.abort_all(EngineGone("the server is shutting down, and time is over; the answer is not whole"))
        self.link.cache.fail(EngineGone("the server is shutting down"))
        self.server.should_exit = True
        while self.server.server_state.tasks and not self.server.force_exit:
            await asyncio.sleep(POLL)
        self.over.set()


def publisher_of(options: ServeOptions, link: EngineLink) -> EventPublisher | None:
    """Its libraries are an extra of their own. An address that is taken is told before the model is loaded."""
    if not options.published.on:
        return None
    from graft.serve.publisher import EventPublisher

    return EventPublisher(options.published, link.cache)


def listening(host: str, port: int) -> socket.socket:
    """Bound before the model is loaded: a port that is taken is told at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        raise UsageError(f"cannot listen at {host} port {port}: {error.strerror or error}") from error
    found.setblocking(False)
    return found


def tls(options: ServeOptions) -> dict[str, Any]:
    """For uvicorn; files that are no certificate or no key of it are told before the model is loaded."""
    cert, key = options.ssl_certfile, options.ssl_keyfile
    if cert is None:
        return {}
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=no_password)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        files = f"--ssl-certfile {cert}" + ("" if key is None else f", --ssl-keyfile {key}")
        raise UsageError(f"{files}: {error}") from error
    return {"ssl_certfile": cert, "ssl_keyfile": key}


def no_password() -> str:
    """Without it OpenSSL would ask the terminal."""
    raise ValueError("the key has a password; take it off (openssl pkey), and guard the file")


def url_of(bound: socket.socket, scheme: str) -> str:
    host, port = bound.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def serve(options: ServeOptions) -> int:
    """Serves until it is told to end; the exit code."""
    return asyncio.run(Serving(options).main())
