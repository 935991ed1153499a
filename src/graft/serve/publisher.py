"""Events of the cache over ZMQ in vLLM's wire format, for routers (Dynamo, llm-d, production-stack).

Frames of a message: topic, sequence number (8 bytes, big-endian, from 0), msgpack of [time, [event, …], rank 0].
Whoever subscribes late, or loses messages, asks the replay socket for those from a number on. After the engine's end,
and where events were lost, AllBlocksCleared comes first and then what is stored: routers never keep what is gone.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from graft.base.errors import EngineGone, ExtraMissing, UsageError
from graft.engine.kv.events import Created, Event, Removed, Stored
from graft.serve.cache_events import CacheFeed, EventReader
from graft.serve.kv_events_config import OPTION, KvEventsConfig

try:
    import msgpack
    import zmq
    import zmq.asyncio
except ModuleNotFoundError as error:
    raise ExtraMissing(OPTION, "kv-events", error.name or "pyzmq") from error

MEDIUM = "GPU"  # vLLM's word for the engine's own memory; routers know no other first tier
FIELDS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}  # fmt: skip
LAST = (-1).to_bytes(8, "big", signed=True)  # ends a replay
AGAIN = 0.5  # seconds until an engine that is gone is looked for


def short_hash(name: str | None) -> int | None:
    """64 bits, as vLLM sends its own."""
    return None if name is None else int(name[-16:], 16)


def as_vllm(event: Event, block_size: int) -> Iterator[tuple[str, list[Any]]]:
    """`updated` has no counterpart: routers ask what is stored, not whether it is in use or in host memory."""
    if isinstance(event, Created):
        yield "AllBlocksCleared", []
    elif isinstance(event, Stored):
        tokens = [token for block in event.blocks for token in block.tokens]
        hashes = [short_hash(block.hash) for block in event.blocks]
        yield "BlockStored", [hashes, short_hash(event.parent), tokens, block_size, None, MEDIUM, None]
    elif isinstance(event, Removed):
        yield "BlockRemoved", [[short_hash(name) for name in event.hashes], MEDIUM]


class EventPublisher:
    def __init__(self, config: KvEventsConfig, feed: CacheFeed) -> None:
        self.config, self.feed = config, feed
        self.block_size, self.number = 0, 0
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        context = zmq.asyncio.Context.instance()
        self.sockets: list[Any] = []
        self.out = self.opened(context, zmq.PUB, config.endpoint)
        self.replays = None
        if config.replay_endpoint is not None:
            self.replays = self.opened(context, zmq.ROUTER, config.replay_endpoint, bind=True)

    def opened(self, context: Any, kind: int, endpoint: str, bind: bool = False) -> Any:
        made = context.socket(kind)
        self.sockets.append(made)
        made.set_hwm(self.config.hwm)
        made.linger = 0
        bind = bind or "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
        try:
            made.bind(endpoint) if bind else made.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise UsageError(f"{OPTION}: cannot {'listen' if bind else 'connect'} at {endpoint}: {error}") from error
        return made

    async def run(self) -> None:
        """Until it is cancelled."""
        replay = asyncio.create_task(self.replay_forever()) if self.replays is not None else None
        try:
            while True:
                try:
                    await self.publish_while_it_lives()
                except EngineGone:
                    await asyncio.sleep(AGAIN)
        finally:
            if replay is not None:
                replay.cancel()
            self.close()

    async def publish_while_it_lives(self) -> None:
        reader = EventReader()
        self.feed.follow(reader)
        try:
            while True:
                if events := await reader.read():
                    await self.publish(events)
        finally:
            self.feed.leave(reader)

    async def publish(self, events: Sequence[Event]) -> None:
        told: list[Any] = []
        for event in events:
            if isinstance(event, Created):
                self.block_size = event.block_size
            for kind, values in as_vllm(event, self.block_size):
                named = {"type": kind, **dict(zip(FIELDS[kind], values, strict=True))}
                told.append(named if self.config.encoding == "map" else [kind, *values])
        if not told:
            return
        payload: Any = msgpack.packb([time.time(), told, 0])
        self.kept.append((self.number, payload))
        await self.out.send_multipart((self.config.topic.encode(), self.number.to_bytes(8, "big"), payload))
        self.number += 1

    async def replay_forever(self) -> None:
        assert self.replays is not None
        while True:
            client, *asked = await self.replays.recv_multipart()
            if len(asked) != 2 or len(asked[1]) != 8:
                continue  # nobody that we could answer
            first = int.from_bytes(asked[1], "big")
            for number, payload in [one for one in self.kept if one[0] >= first]:
                await self.replays.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
            await self.replays.send_multipart((client, b"", LAST, b""))

    def close(self) -> None:
        for one in self.sockets:
            one.close()
