"""Events over ZMQ as vLLM's consumers read them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys

import pytest

from cache_model import run
from graft.base.errors import ExtraMissing, UsageError
from graft.engine.kv.events import EventQueue
from graft.engine.kv.manager import BlockManager
from graft.serve.cache_events import CacheFeed
from graft.serve.kv_events_config import KvEventsConfig, parse_config
from serve_cases import serving

msgpack, zmq = pytest.importorskip("msgpack"), pytest.importorskip("zmq")
FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Consumer:
    """After vLLM's kv_events_subscriber.py: SUB, and REQ for what was missed."""

    def __init__(self, port, replay, topic=b""):
        self.context = zmq.Context()
        self.sub, self.req = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        self.sub.setsockopt(zmq.SUBSCRIBE, topic)
        self.sub.connect(f"tcp://127.0.0.1:{port}")
        self.req.connect(f"tcp://127.0.0.1:{replay}")
        for one in (self.sub, self.req):
            one.setsockopt(zmq.RCVTIMEO, 60_000)
            one.setsockopt(zmq.LINGER, 0)
        self.held, self.seen = {}, []

    def apply(self, payload):
        _, events, rank = msgpack.unpackb(payload, strict_map_key=False)
        assert rank == 0
        for event in events:
            if isinstance(event, list):
                event = {"type": event[0], **dict(zip(FIELDS, event[1:], strict=False))}
            self.seen.append(event["type"])
            if event["type"] == "BlockStored":
                assert event["parent_block_hash"] is None or event["parent_block_hash"] in self.held
                assert len(event["token_ids"]) == event["block_size"] * len(event["block_hashes"])
                assert event["medium"] == "GPU" and all(0 <= one < 2**64 for one in event["block_hashes"])
                tokens = zip(*[iter(event["token_ids"])] * event["block_size"], strict=True)
                self.held.update(zip(event["block_hashes"], tokens, strict=True))
            elif event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    del self.held[name]
            else:
                self.held.clear()

    def read(self):
        topic, number, payload = self.sub.recv_multipart()
        self.apply(payload)
        return topic, int.from_bytes(number, "big")

    def replay(self, first):
        self.req.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            _, number, payload = self.req.recv_multipart()
            if not payload:
                assert int.from_bytes(number, "big", signed=True) == -1
                return found
            found.append(int.from_bytes(number, "big"))
            self.apply(payload)

    def close(self):
        self.context.destroy(0)


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_a_consumer_knows_what_is_stored(encoding):
    """Every block of a real manager, evictions included, and after a replay from the beginning the same."""
    from graft.serve.publisher import EventPublisher, short_hash

    port, replay = free_port(), free_port()

    async def go():
        events, feed = EventQueue(), CacheFeed(lambda _: None)
        manager = BlockManager(6, 2, events=events)
        config = KvEventsConfig(True, "zmq", f"tcp://*:{port}", f"tcp://*:{replay}", topic="kv@a", encoding=encoding)
        publisher = EventPublisher(config, feed)
        task = asyncio.create_task(publisher.run())
        consumer, late = Consumer(port, replay, b"kv@"), Consumer(port, replay)

        async def tell():
            feed.take(1, events.drain())
            told = publisher.number
            while publisher.number == told:
                await asyncio.sleep(0)

        try:
            await asyncio.sleep(0)  # it follows
            await tell()
            for first in range(8):
                manager.close(run(manager, [first, 1, 2, first, 3]))
                await tell()
            known = {short_hash(name): block.tokens for name, block in feed.view.blocks.items()}
            assert await asyncio.to_thread(late.replay, 0) == list(range(9)) and late.held == known
            assert {"BlockStored", "BlockRemoved", "AllBlocksCleared"} == set(late.seen)
            late.apply = lambda _: None
            assert await asyncio.to_thread(late.replay, 7) == [7, 8]
            late.req.send_multipart((b"what", b"ever", b"?"))  # no request: nobody is answered, and nothing breaks
            assert await asyncio.to_thread(late.replay, 99) == []
            consumer.apply = lambda _: None
            while not await asyncio.to_thread(consumer.sub.poll, 10):  # until the subscription has come through
                manager.close(run(manager, [publisher.number, 5, 5]))
                await tell()
            topic, number = consumer.read()
            assert topic == b"kv@a" and number < publisher.number
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            consumer.close()
            late.close()

    asyncio.run(go())


def test_a_server_publishes_and_tells_of_a_new_engine():
    port, replay = free_port(), free_port()
    config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{replay}"}
    with serving("stub", "--restart", "--kv-events-config", json.dumps(config)) as server:
        assert server.url
        consumer = Consumer(port, replay)
        try:
            while not consumer.replay(0):
                pass
            assert sorted(consumer.held) == [0xA1, 0xA2, 0xA3, 0xB1] and consumer.held[0xB1] == (8, 8, 8, 8)
            os.kill(server.engine, signal.SIGKILL)
            while consumer.replay(1) != [1]:
                pass
            assert consumer.seen.count("AllBlocksCleared") >= 2 and len(consumer.held) == 4
            server.signal()
            assert server.ended() == 0
        finally:
            consumer.close()


def test_an_address_that_is_taken_is_told():
    from graft.serve.publisher import EventPublisher

    async def go():
        with socket.socket() as taken:
            taken.bind(("0.0.0.0", 0))
            taken.listen()
            config = KvEventsConfig(True, endpoint=f"tcp://*:{taken.getsockname()[1]}")
            with pytest.raises(UsageError, match="cannot listen at tcp"):
                EventPublisher(config, CacheFeed(lambda _: None))

    asyncio.run(go())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "must be a JSON object"),
        ("[]", "must be a JSON object"),
        ('{"endpont": "x"}', "unknown key 'endpont'.*endpoint"),
        ('{"hwm": 0}', "hwm must be a whole number above 0"),
        ('{"enable_kv_cache_events": 1}', "must be true or false"),
        ('{"replay_endpoint": 5}', "must be an address or null"),
        ('{"publisher": "kafka"}', "publisher must be zmq or null"),
        ('{"encoding": "json"}', "encoding must be map or array"),
    ],
)
def test_a_config_that_cannot_be_is_told(text, why):
    with pytest.raises(UsageError, match=why):
        parse_config(text)


def test_nothing_is_published_unless_asked():
    assert not parse_config(None).on and not parse_config("{}").on
    assert parse_config('{"enable_kv_cache_events": true}').on
    assert not parse_config('{"enable_kv_cache_events": true, "publisher": "null"}').on


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "graft.serve.publisher", raising=False)
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ExtraMissing, match=r"graft\[kv-events\]"):
        import graft.serve.publisher  # noqa: F401
