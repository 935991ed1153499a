"""As much of an HTTP/1.1 client as a load generator needs: POST and GET over connections that are kept, and the lines
of an answer as they come. A library's parsing of every chunk would take a core from a server on the same machine."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from graft.base.errors import UsageError

LONGEST_LINE = 1 << 24  # bytes: a line of an answer, or its head
SCHEMES = {"http": 80, "https": 443}
VERSIONS = ("/v1", "/v2", "/v3", "/api")  # how the base URL of an OpenAI client ends


class HttpFailed(Exception):
    """An exchange that did not come to its end; the message says how."""


@dataclass(frozen=True)
class HttpTarget:
    """Where a server is. base: the path before `/completions`."""

    host: str
    port: int
    base: str
    secure: ssl.SSLContext | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, url: str, key: str | None = None, verify: bool = True) -> HttpTarget:
        """url: as OpenAI clients take it (`http://host:8000/v1`), or without the version."""
        found = urlsplit(url)
        try:
            port = found.port
        except ValueError as error:
            raise UsageError(f"--serve {url}: {error}") from error
        if found.scheme not in SCHEMES or not found.hostname:
            raise UsageError(f"--serve takes a URL like http://127.0.0.1:8000/v1, not {url!r}")
        path = found.path.rstrip("/")
        if key is not None and any(ord(letter) < 33 or ord(letter) > 126 for letter in key):
            raise UsageError("--api-key: a key has no spaces and nothing but ASCII")
        return cls(
            found.hostname,
            port or SCHEMES[found.scheme],
            path if path.endswith(VERSIONS) else f"{path}/v1",
            context(verify) if found.scheme == "https" else None,
            {} if key is None else {"Authorization": f"Bearer {key}"},
        )

    @property
    def name(self) -> str:
        """As the Host header has it: an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def context(verify: bool) -> ssl.SSLContext:
    made = ssl.create_default_context()
    if not verify:
        made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    return made


@dataclass(eq=False)
class HttpConnection:
    """One connection; one exchange at a time. It is opened when it is first needed."""

    target: HttpTarget
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None
    resent: int = 0  # requests that were sent again

    async def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, dict[str, str]]:
        """Status and headers of the answer. A kept connection that turns out to be closed, without an answer's first
        byte, is opened anew, as curl does, and that is counted: some servers close it after a stream, unannounced. On
        a new one nothing is sent twice, since that would hide a failure."""
        raw = b"" if body is None else json.dumps(body).encode()
        head = {"Host": self.target.name, **self.target.headers}
        if body is not None:
            head |= {"Content-Type": "application/json", "Content-Length": str(len(raw))}
        lines = [f"{method} {self.target.base}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
        request, first = "\r\n".join([*lines, "", ""]).encode() + raw, b""
        if self.reader is not None and self.reader.at_eof():
            self.close()
        if self.writer is not None:
            with suppress(ConnectionError):
                first = await self.exchange(request)
            if not first:
                self.close()
                self.resent += 1
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(
                self.target.host, self.target.port, ssl=self.target.secure, limit=LONGEST_LINE
            )
            first = await self.exchange(request)
        parts = first.split(maxsplit=2)
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/") or not parts[1].isdigit():
            raise HttpFailed("the connection was closed before an answer" if not first else "this is no HTTP answer")
        headers: dict[str, str] = {}
        while (line := (await self.line()).strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        return int(parts[1]), headers

    async def exchange(self, request: bytes) -> bytes:
        """The first line of the answer; nothing where the server has closed the connection."""
        assert self.writer is not None
        self.writer.write(request)
        await self.writer.drain()
        return await self.line()

    async def line(self) -> bytes:
        assert self.reader is not None
        return await self.reader.readline()

    async def pieces(self, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        """The body as it comes. Ends when it is whole; one that is cut off is an error."""
        assert self.reader is not None
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := chunk_size(await self.line()):
                yield await self.reader.readexactly(size)
                await self.line()
            await self.line()
        elif (length := headers.get("content-length", "")).isdecimal():
            yield await self.reader.readexactly(int(length))
        else:
            while piece := await self.reader.read(LONGEST_LINE):
                yield piece
            self.close()
        if headers.get("connection", "").lower() == "close":
            self.close()

    async def lines(self, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        rest = b""
        async for piece in self.pieces(headers):
            *whole, rest = (rest + piece).split(b"\n")
            for one in whole:
                yield one
        if rest:
            yield rest

    async def body(self, headers: Mapping[str, str]) -> bytes:
        return b"".join([piece async for piece in self.pieces(headers)])

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


def chunk_size(line: bytes) -> int:
    try:
        return int(line.split(b";")[0], 16)
    except ValueError:
        raise HttpFailed("the answer was cut off" if not line else "a chunk has no size") from None
