"""Clients that behave as clients do: some read all, some leave early, some send what cannot be meant."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

LARGE = b"x" * 5_000_000
# a client in a process of its own, which can be stopped: sends its standard input, and prints the answer
CLIENT = """
import socket, sys
found = socket.create_connection((sys.argv[1], int(sys.argv[2])))
found.sendall(sys.stdin.buffer.read())
while piece := found.recv(65536):
    sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()
"""
# what clients do, and how often
KINDS = {
    "whole": 4.0, "streamed": 6.0, "slowly": 0.5, "stopped": 0.05, "leaves": 3.0, "leaves_a_stream": 5.0,
    "half_closes": 1.0, "half_a_body": 0.5, "bad": 2.0, "huge": 0.2,
}  # fmt: skip
ANSWERED = ("whole", "streamed", "slowly", "stopped", "bad", "huge")  # those who must have an answer, or an error


@dataclass
class Soak:
    """expected: a body and the tokens of its answer, of which clients take one each."""

    host: str
    port: int
    expected: list[tuple[dict[str, Any], list[int]]]
    rng: random.Random
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # from connecting to the end

    async def run(self, count: int, at_once: int, kill: Callable[[], None] | None = None) -> None:
        """kill: ends the engine process, in the middle; requests go on when another is ready."""
        gate, going = asyncio.Semaphore(at_once), asyncio.Event()
        going.set()

        async def one(number: int) -> None:
            async with gate:
                await going.wait()
                kind = self.rng.choices(list(KINDS), list(KINDS.values()))[0]
                body, tokens = self.rng.choice(self.expected)
                if kill is not None and number == count // 2:
                    going.clear()
                    kill()
                    asyncio.get_running_loop().create_task(self.wait_until_ready(going))
                began = time.perf_counter()
                try:
                    told = await getattr(self, kind)(body, tokens, self.rng.random() * 0.05)
                    self.seen[told] += 1
                    self.seconds[told].append(time.perf_counter() - began)
                except ConnectionError:
                    self.seen[f"{kind}: closed by the server"] += 1
                    if kind in ANSWERED:
                        self.wrong.append(f"{kind}: no answer to {body}")

        for first in range(0, count, 2000):  # so many are made at once
            await asyncio.gather(*(one(number) for number in range(first, min(first + 2000, count))))

    async def wait_until_ready(self, going: asyncio.Event) -> None:
        while (await self.asked(b"", "GET", "/ready"))[0] != 200:
            await asyncio.sleep(0.05)
        going.set()

    def request(self, body: bytes, method: str = "POST", path: str = "/v1/completions") -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    async def opened(self, *request: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(self.request(*request))
        return reader, writer

    async def asked(self, *request: Any) -> tuple[int, bytes]:
        reader, writer = await self.opened(*request)
        answer = await reader.read()
        writer.close()
        return parted(answer)

    def check(self, found: list[int], tokens: list[int], what: str) -> None:
        if found != tokens:
            self.wrong.append(f"{what}: {found}, but {tokens} were expected")

    async def whole(self, body: dict[str, Any], tokens: list[int], _: float) -> str:
        status, answer = await self.asked(json.dumps(body).encode())
        if status == 200:
            self.check(json.loads(answer)["choices"][0]["token_ids"], tokens, "whole")
        return f"whole: {status}"

    async def streamed(self, body: dict[str, Any], tokens: list[int], _: float) -> str:
        status, answer = await self.asked(json.dumps({**body, "stream": True}).encode())
        return self.read_stream("streamed", status, answer, tokens)

    def read_stream(self, kind: str, status: int, answer: bytes, tokens: list[int]) -> str:
        """All tokens and an end; or an error as the last event."""
        if status != 200:
            return f"{kind}: {status}"
        events = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
        found = [token for one in events if "error" not in one for token in one["choices"][0]["token_ids"]]
        if events and "error" in events[-1]:
            if found != tokens[: len(found)]:
                self.wrong.append(f"{kind}: {found}, then an error, but {tokens} were expected")
            return f"{kind}: ended by an error"
        self.check(found, tokens, kind)
        if b"data: [DONE]" not in answer:
            self.wrong.append(f"{kind}: it has no end")
        return f"{kind}: {status}"

    async def slowly(self, body: dict[str, Any], tokens: list[int], patience: float) -> str:
        """Reads a little, and waits."""
        reader, writer = await self.opened(json.dumps({**body, "stream": True}).encode())
        pieces = []
        while piece := await reader.read(2000):
            pieces.append(piece)
            await asyncio.sleep(patience)
        writer.close()
        return self.read_stream("slowly", *parted(b"".join(pieces)), tokens)

    async def stopped(self, body: dict[str, Any], tokens: list[int], patience: float) -> str:
        """A process that is stopped in the middle, and goes on."""
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-S", "-c", CLIENT, self.host, str(self.port))
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(self.request(json.dumps({**body, "stream": True}).encode()))
        process.stdin.close()
        first = await process.stdout.read(100)
        with suppress(ProcessLookupError):  # it may have had the whole answer, and have ended, at any time
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(10 * patience)
            process.send_signal(signal.SIGCONT)
        rest = await process.stdout.read()
        await process.wait()
        return self.read_stream("stopped", *parted(first + rest), tokens)

    async def leaves(self, body: dict[str, Any], _: list[int], patience: float) -> str:
        _reader, writer = await self.opened(json.dumps(body).encode())
        await asyncio.sleep(patience)
        writer.close()
        return "left"

    async def leaves_a_stream(self, body: dict[str, Any], _: list[int], patience: float) -> str:
        reader, writer = await self.opened(json.dumps({**body, "stream": True}).encode())
        await reader.read(200)
        await asyncio.sleep(patience)
        writer.transport.abort()  # a reset, not a close
        return "left a stream"

    async def half_closes(self, body: dict[str, Any], _: list[int], __: float) -> str:
        """It sends no more, and may be taken for gone."""
        reader, writer = await self.opened(json.dumps(body).encode())
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        return "half closed: answered" if answer else "half closed: closed"

    async def half_a_body(self, body: dict[str, Any], _: list[int], patience: float) -> str:
        text = self.request(json.dumps(body).encode())
        _reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(text[:-5])
        await asyncio.sleep(patience)
        writer.close()
        return "left with half a body"

    async def bad(self, body: dict[str, Any], _: list[int], __: float) -> str:
        text = json.dumps({**body, "temperature": -1}).encode()
        cut = self.rng.choice([len(text), len(text) // 2])
        status, answer = await self.asked(text[:cut])
        if status not in (400, 503) or "error" not in json.loads(answer):
            self.wrong.append(f"bad: {status} {answer!r}")
        return f"bad: {status}"

    async def huge(self, _: dict[str, Any], __: list[int], ___: float) -> str:
        status, _answer = await self.asked(LARGE)
        if status != 413:
            self.wrong.append(f"huge: {status}")
        return f"huge: {status}"


def parted(answer: bytes) -> tuple[int, bytes]:
    """Status and body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head:
        raise ConnectionResetError
    return int(head.split()[1]), body
