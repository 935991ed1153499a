"""How many connections there may be, and what is told where there are no files for more."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from functools import partial

import pytest
import uvicorn

from graft.serve import connections
from graft.serve.connections import Connection, LoopErrors, room_for_connections
from graft.serve.metrics import Metrics


async def answer(_scope, receive, send):
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def one_too_many(metrics):
    with socket.create_server(("127.0.0.1", 0)) as bound:
        made = partial(Connection, slow=60, most=2, metrics=metrics)
        config = uvicorn.Config(answer, http=made, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        host, port = bound.getsockname()
        opened = [await asyncio.open_connection(host, port) for _ in range(2)]
        refused, writer = await asyncio.open_connection(host, port)
        told = await refused.read()
        writer.close()
        for reader, writer in opened:  # those before are served
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).endswith(b"ok")
            writer.close()
        server.should_exit = True
        await serving
        return told


def test_one_connection_too_many_is_told_so():
    metrics = Metrics()
    told = asyncio.run(one_too_many(metrics))
    assert told.startswith(b"HTTP/1.1 503 ") and b"Retry-After" in told and metrics.refused == {"503": 1}


@pytest.mark.parametrize(
    ("limits", "raised", "room"),
    [((1024, 4096), 4096, 4096 - 128), ((1024, -1), 65_536, 65_536 - 128), ((20_000, 20_000), None, 20_000 - 128),
     ((-1, -1), None, 65_536 - 128), ((64, 64), None, 32)],
)  # fmt: skip
def test_the_limit_of_files_is_raised(monkeypatch, limits, raised, room):
    given = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, found: given.append(found))
    assert room_for_connections() == room
    assert given == ([] if raised is None else [(raised, limits[1])])


def test_no_files_are_a_line_a_second_and_other_errors_are_not_swallowed(monkeypatch):
    now, lines, rest = [0.0], [], []
    monkeypatch.setattr(connections.time, "monotonic", lambda: now[0])
    loop = asyncio.new_event_loop()
    monkeypatch.setattr(loop, "default_exception_handler", rest.append)
    errors = LoopErrors(lambda event, **values: lines.append((event, values["times"])))
    for _ in range(5):
        errors(loop, {"exception": OSError(errno.EMFILE, "Too many open files")})
    now[0] = 2.0
    errors(loop, {"exception": OSError(errno.EMFILE, "Too many open files")})
    assert lines == [("connections wait", 1), ("connections wait", 5)] and not rest
    errors(loop, {"exception": ValueError("a defect")})
    errors(loop, {"message": "no error at all"})
    assert len(rest) == 2
    loop.close()
