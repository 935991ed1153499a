"""Clients that behave as clients do: some read all, some leave early, some send what cannot be meant."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

LARGE = b"x" * 5_000_000


@dataclass
class Soak:
    """expected: a body and the tokens of its answer, of which clients take one each."""

    host: str
    port: int
    expected: list[tuple[dict[str, Any], list[int]]]
    rng: random.Random
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def run(self, count: int, at_once: int) -> None:
        gate = asyncio.Semaphore(at_once)

        async def one(kind: str, body: dict[str, Any], tokens: list[int], patience: float) -> None:
            async with gate:
                try:
                    self.seen[await getattr(self, kind)(body, tokens, patience)] += 1
                except ConnectionError:
                    self.seen[f"{kind}: closed by the server"] += 1
                    if kind in ("whole", "streamed", "bad", "huge"):
                        self.wrong.append(f"{kind}: no answer to {body}")

        kinds = ("whole", "streamed", "leaves", "leaves_a_stream", "half_closes", "bad", "huge")
        jobs = []
        for _ in range(count):
            kind = self.rng.choices(kinds, (4, 6, 3, 5, 1, 2, 0.2))[0]
            jobs.append(one(kind, *self.rng.choice(self.expected), self.rng.random() * 0.05))
        await asyncio.gather(*jobs)

    async def opened(self, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        return reader, writer

    async def asked(self, body: bytes) -> tuple[int, bytes]:
        reader, writer = await self.opened(body)
        head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        if not head:
            raise ConnectionResetError
        return int(head.split()[1]), answer

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
        if status == 200:
            lines = [line for line in answer.split(b"\n") if line.startswith(b"data: {")]
            found = [token for line in lines for token in json.loads(line[6:])["choices"][0]["token_ids"]]
            self.check(found, tokens, "streamed")
            if b"data: [DONE]" not in answer:
                self.wrong.append("streamed: it has no end")
        return f"streamed: {status}"

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

    async def bad(self, body: dict[str, Any], _: list[int], __: float) -> str:
        text = json.dumps({**body, "temperature": -1}).encode()
        cut = self.rng.choice([len(text), len(text) // 2])
        status, answer = await self.asked(text[:cut])
        if status != 400 or "error" not in json.loads(answer):
            self.wrong.append(f"bad: {status} {answer!r}")
        return f"bad: {status}"

    async def huge(self, _: dict[str, Any], __: list[int], ___: float) -> str:
        status, _answer = await self.asked(LARGE)
        if status != 413:
            self.wrong.append(f"huge: {status}")
        return f"huge: {status}"
