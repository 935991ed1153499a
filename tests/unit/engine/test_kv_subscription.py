"""Events of the cache by callback."""

from __future__ import annotations

import gc
import threading
import time

import pytest

import graft
from cache_model import kinds, run
from graft.engine.kv.events import EventQueue
from graft.engine.kv.manager import BlockManager
from graft.engine.kv.subscription import EventSubscription
from graft.engine.kv.view import CacheView


def test_a_callback_gets_every_event_and_takes_none_from_pollers():
    queue = EventQueue()
    manager = BlockManager(8, 2, fingerprint="m", events=queue)
    run(manager, [1, 2, 3, 4])
    polled, view, told = queue.drain(), CacheView(), []
    with EventSubscription(queue, told.extend):
        run(manager, [5, 6, 7, 8])
        run(manager, [9, 9])
    assert kinds(told) == ["created", "stored", "stored", "stored"]  # the present state first, then what happened
    for event in told:
        view.apply(event)
    assert {tuple(block.tokens) for block in view.blocks.values()} == {(1, 2), (3, 4), (5, 6), (7, 8), (9, 9)}
    assert kinds(polled + queue.drain()) == ["created", "stored", "stored", "stored"]
    run(manager, [7, 7])
    assert len(told) == 4 and not queue.branches  # closed


def test_what_a_callback_raises_ends_it_and_is_raised_again(caplog):
    queue, called = EventQueue(), threading.Event()
    manager = BlockManager(8, 2, fingerprint="m", events=queue)

    def broken(events):
        called.set()
        raise ValueError("no such dashboard")

    subscription = EventSubscription(queue, broken)
    assert called.wait(60)
    with pytest.raises(ValueError, match="no such dashboard"):
        subscription.close()
    assert not queue.branches and "is not called again" in caplog.text
    run(manager, [1, 2])
    assert kinds(queue.drain()) == ["created", "stored"]


def test_a_callback_may_close_its_own_subscription_and_a_slow_one_loses_history_alone():
    queue = EventQueue(limit=2)
    manager = BlockManager(8, 2, fingerprint="m", events=queue)
    queue.drain()
    told, entered, go_on = [], threading.Event(), threading.Event()

    def slow(events):
        told.extend(events)
        entered.set()
        go_on.wait(60)

    subscription = EventSubscription(queue, slow)
    assert entered.wait(60)
    for token in range(4):
        run(manager, [token, token])
    go_on.set()
    subscription.close()
    view = CacheView()
    for event in told:
        view.apply(event)
    assert "lost" in kinds(told) and len(view.blocks) == 4
    closed, holder = threading.Event(), []

    def once(events):
        while not holder:
            time.sleep(0.001)
        holder[0].close()
        closed.set()

    holder.append(EventSubscription(queue, once))
    assert closed.wait(60)


def test_an_engine_tells_by_callback():
    llm, told = graft.LLM("tiny-llama", dtype="float32", device="cpu", backend="eager"), []
    with llm.on_kv_cache_events(told.extend):
        llm.generate([[3 + i for i in range(40)]], graft.SamplingParams(max_tokens=2))
    assert kinds(told) == kinds(llm.kv_cache_events()) == ["created", "stored", "updated"]
    left = llm.on_kv_cache_events(told.extend)
    del llm
    gc.collect()
    left.thread.join(60)
    assert not left.thread.is_alive()  # nobody closed it, and it does not outlive its engine
