"""The life of the HTTP process: bind, start the engine, serve, drain, end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import uvicorn

from graft.base.errors import EngineFailed, EngineGone, GraftError, ModelNotLoaded, UsageError
from graft.engine.params import SamplingParams
from graft.serve.app import make_app
from graft.serve.keys import ApiKeys
from graft.serve.link import EngineLink
from graft.serve.logs import ServerLog
from graft.serve.metrics import Metrics
from graft.serve.options import ServeOptions
from graft.serve.state import ServerState
from graft.serve.text import ServedText

if TYPE_CHECKING:
    from graft.serve.publisher import EventPublisher

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CLOSING = 5  # seconds that connections have to end after the last answer
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before an engine process that died is started again
UVICORN: dict[str, Any] = {
    "lifespan": "off", "log_config": None, "access_log": False, "server_header": False, "ws": "none",
    "timeout_graceful_shutdown": CLOSING, "backlog": 2048,
}  # fmt: skip
POLL = 0.02  # seconds between two looks at whether all is answered


class QuietServer(uvicorn.Server):
    """uvicorn without its own idea of signals: the first drains, the second ends."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Serving:
    """One server from start to end; `main` gives the exit code."""

    def __init__(self, options: ServeOptions) -> None:
        self.options, metrics, log = options, Metrics(), ServerLog(options.json_logs)
        link = EngineLink(options, metrics, log)
        self.state = ServerState(options, link, metrics, ApiKeys(options.api_key, options.api_key_file), log)
        self.log, self.link = log, link
        self.socket = listening(options.host, options.port)
        self.url = url_of(self.socket, "http" if options.ssl_certfile is None else "https")
        self.publisher = publisher_of(options, link)
        self.server = QuietServer(uvicorn.Config(make_app(self.state), **UVICORN, **tls(options)))
        self.over = asyncio.Event()  # set when the process is to end
        self.warming: asyncio.Task[None] | None = None
        self.was_ready = False

    async def main(self) -> int:
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # what matters is in our own lines
        loop = asyncio.get_running_loop()
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

    async def keep_engine(self) -> None:
        """Until the server ends. Raises where the first process cannot load the model, or answers nothing."""
        pause = FIRST_PAUSE
        while True:
            how = await self.link.run(self.on_loaded)
            self.state.warm = False
            if self.state.draining:
                self.over.set()
                return
            why = self.link.failed[0] if self.link.failed else how
            if not self.was_ready:
                when = "while it loaded" if self.link.model is None else "over its first request"
                raise ModelNotLoaded(*self.link.failed or (f"the engine process {how} {when}", 1))
            self.log("engine died", reason=why, restart=self.options.restart)
            if not self.options.restart:
                await self.over.wait()
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE) if self.link.failed else FIRST_PAUSE
            self.state.metrics.restarts += 1
            self.link.failed = None

    def on_loaded(self) -> None:
        self.warming = asyncio.create_task(self.warm_up())

    async def warm_up(self) -> None:
        """Ready is who has answered: a first request, through the engine."""
        model = self.link.model
        assert model is not None
        try:
            self.state.text = await asyncio.to_thread(
                ServedText, model, self.options.tool_call_parser, self.options.reasoning_parser
            )
            with suppress(UsageError):  # where there can be no grammar, whoever asks for one is told
                await asyncio.to_thread(self.state.text.read_vocabulary)
            params = SamplingParams(max_tokens=min(2, model.context - 1), ignore_eos=True)
            ticket = self.link.submit([[0]], [params], follow=False)
            while ticket.left or ticket.rows:
                for _, row in await ticket.read():
                    if row.error:
                        raise EngineFailed(f"its first request failed: {row.error}")
        except EngineGone:  # keep_engine sees that too, and tells it
            return
        except GraftError as error:
            self.link.failed, self.link.model = (str(error), error.exit_code), None
            await self.link.stop()
            return
        self.state.warm = self.was_ready = True
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
