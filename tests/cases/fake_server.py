"""A server of OpenAI's API that goes wrong as it is told: for tests of the load generator."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EVENT = {"choices": [{"index": 0, "text": "word", "delta": {"content": "word"}}]}


class FakeServer:
    """kinds: how the requests are answered, one after another; the last one goes on. See `answer`."""

    def __init__(self, *kinds: str) -> None:
        self.kinds, self.seen, self.connections = list(kinds), [], 0
        self.loop = asyncio.new_event_loop()
        self.port = 0

    async def start(self) -> None:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self.server.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while (line := await reader.readline()).strip():
            length = 0
            while (head := (await reader.readline()).strip()) != b"":
                if head.lower().startswith(b"content-length:"):
                    length = int(head.split(b":")[1])
            body = await reader.readexactly(length)
            if line.startswith(b"GET"):
                self.send(writer, 200, {"data": [{"id": "fake"}]})
                continue
            self.seen.append((line.split()[1].decode(), json.loads(body)))
            kind = self.kinds.pop(0) if len(self.kinds) > 1 else self.kinds[0]
            if not self.answer(writer, kind, self.seen[-1][1]):
                break
        writer.close()

    def send(self, writer: asyncio.StreamWriter, status: int, body: object) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)

    def answer(self, writer: asyncio.StreamWriter, kind: str, body: dict) -> bool:
        """Whether the connection is kept."""
        if kind.isdigit():
            self.send(writer, int(kind), {"error": {"message": f"told to be {kind}"}})
            return True
        if kind == "silent":
            return False
        if kind == "nonsense":
            writer.write(b"hello\r\n\r\n")
            return False
        text = body.get("prompt") or body["messages"][0]["content"]
        usage = {"prompt_tokens": 2 * len(text.split()) + 5, "completion_tokens": body["max_tokens"]}
        events = [json.dumps(EVENT)] * body["max_tokens"]
        events += [] if kind == "uncounted" else [json.dumps({"choices": [], "usage": usage})]
        if kind == "error event":
            events[1:] = [json.dumps({"error": {"message": "it broke"}})]
        if kind == "no error":
            events[0] = json.dumps({**EVENT, "error": None})
        if kind == "bare event":
            events[1:] = ["7"]
        if kind == "bad event":
            events[1:] = ["{no"]
        if kind not in ("error event", "unfinished"):
            events.append("[DONE]")
        data = "".join(f"data: {one}\n\n" for one in events).encode()
        if kind == "until closed":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + data)
            return False
        more = b"Connection: close\r\n" if kind == "closing" else b""
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n" + more + b"\r\n")
        for at in range(0, len(data), 7):  # lines are broken anywhere
            piece = data[at : at + 7]
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        if kind == "cut":
            return False
        writer.write(b"0\r\n\r\n")
        return kind not in ("closing", "closing silently")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def fake_server(*kinds: str) -> Iterator[FakeServer]:
    made = FakeServer(*kinds)
    made.loop.run_until_complete(made.start())
    thread = threading.Thread(target=made.loop.run_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        asyncio.run_coroutine_threadsafe(made.stop(), made.loop).result()
        made.loop.call_soon_threadsafe(made.loop.stop)
        thread.join()
        made.loop.close()
