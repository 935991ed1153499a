"""Events of the cache: their order, their numbers, and that the state can be rebuilt from them alone."""

from __future__ import annotations

import json
import threading
import time
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_model import Simulation, bits, kinds, random_trace, run, state_of, state_seen, trace_step
from graft.base.errors import CacheMisuse, EventOrder
from graft.engine.kv import events as kv
from graft.engine.kv.events import (
    Created,
    EventQueue,
    Lost,
    Removed,
    Stored,
    StoredBlock,
    Updated,
    from_json,
)
from graft.engine.kv.hashing import block_hash, root_hash
from graft.engine.kv.manager import BlockManager
from graft.engine.kv.view import CacheView
from marks import examples


def test_the_life_of_blocks():
    queue = EventQueue()
    manager = BlockManager(3, 2, fingerprint="m", events=queue)
    (created,) = queue.drain()
    assert isinstance(created, Created) and created.event_id == 0
    assert (created.levels, created.block_size, created.root) == ((3,), 2, root_hash("m", 2))

    table = run(manager, [1, 2, 3, 4, 5])
    (stored,) = queue.drain()
    first = block_hash(created.root, (1, 2))
    second = block_hash(first, (3, 4))
    assert stored == Stored(1, stored.time, None, (StoredBlock(first, (1, 2)), StoredBlock(second, (3, 4))))

    manager.grow(table, 6)
    manager.commit(table, [1, 2, 3, 4, 5, 6], 6)
    (stored,) = queue.drain()
    third = block_hash(second, (5, 6))
    assert stored.parent == second and [block.hash for block in stored.blocks] == [third]

    manager.close(table)
    table = manager.open([1, 2, 9])
    unused, used = queue.drain()
    assert unused == Updated(3, unused.time, (third, second, first), "in_use", True, False)
    assert used == Updated(4, used.time, (first,), "in_use", False, True)

    manager.grow(table, 5)
    (removed,) = queue.drain()
    assert removed == Removed(5, removed.time, (third, second))
    assert created.time <= stored.time <= removed.time <= time.time()
    assert queue.drain() == []


def test_what_changes_nothing_stored_tells_nothing():
    queue = EventQueue()
    manager = BlockManager(4, 2, events=queue)
    table = run(manager, [1, 2, 3])
    queue.drain()
    other = manager.fork(table)
    assert manager.grow(other, 100) is None
    manager.grow(other, 4)
    manager.close(other)
    assert queue.drain() == []


def test_an_equal_block_is_told_once_and_wakes_the_stored_one():
    queue = EventQueue()
    manager = BlockManager(8, 2, events=queue)
    a, b = manager.open([1, 2]), manager.open([1, 2])
    for table in (a, b):
        manager.grow(table, 2)
    manager.commit(a, [1, 2], 2)
    manager.close(a)
    manager.commit(b, [1, 2], 2)
    assert kinds(queue.drain()) == ["created", "stored", "updated", "updated"]


def test_events_are_json_and_back():
    queue = EventQueue(limit=12)
    manager = BlockManager(4, 1, events=queue)
    events = []
    for tokens in ([1, 2], [3, 4, 5], [1, 2], [6, 7, 8, 9]):
        manager.close(run(manager, tokens))
        events += queue.drain()
    for tokens in ([1, 2, 3, 4], [3, 4, 5, 6], [1, 2]):
        manager.close(run(manager, tokens))
    events += queue.drain()
    assert {type(event) for event in events} == {Created, Stored, Removed, Updated, Lost}
    lines = [json.dumps(event.to_json()) for event in events]
    assert [from_json(json.loads(line)) for line in lines] == events
    stored = next(json.loads(line) for line in lines if '"stored"' in line)
    assert stored["type"] == "stored" and stored["parent"] is None and stored["blocks"][0]["tokens"] == [1]


def test_ids_have_no_gaps_whatever_the_limit():
    for limit in (1, 5, 65536):
        sim = Simulation(BlockManager(6, 2, events=EventQueue(limit)))
        random, expected, lost = Random(limit), 0, 0
        for _ in range(100):
            trace_step(sim, random)
            for event in sim.manager.events.drain() if random.random() < 0.3 else ():
                if isinstance(event, Lost):
                    assert event.first == expected and event.count == event.last - event.first + 1
                    expected = event.last + 1
                    lost += 1
                assert event.event_id == expected
                expected += 1
        assert (lost > 0) == (limit < 65536)


def test_a_slow_reader_loses_history_not_the_state():
    queue = EventQueue(limit=4)
    manager = BlockManager(8, 1, events=queue)
    manager.close(run(manager, [1, 2, 3]))
    run(manager, [1, 2, 4])
    events = queue.drain()
    assert kinds(events)[:2] == ["lost", "created"] and "removed" not in kinds(events)
    view = CacheView()
    for event in events:
        view.apply(event)
    assert state_seen(view) == state_of(manager)
    run(manager, [5])
    (more,) = queue.drain()
    assert more.event_id == events[-1].event_id + 1
    view.apply(more)


def test_a_view_tells_its_state_to_one_who_comes_later():
    """Built from that, another view is equal, and goes on with the same events under its own numbers."""
    queue = EventQueue()
    manager = BlockManager(8, 2, events=queue)
    view, later = CacheView(), CacheView()
    assert view.state(0, 0.0) == []
    kept = run(manager, [1, 2, 3, 4, 5])
    manager.close(run(manager, [1, 2, 6, 7, 8]))
    for event in queue.drain():
        view.apply(event)
    told = view.state(0, 1.0)
    assert kinds(told) == ["created", "stored", "stored", "updated"]
    for event in told:
        later.apply(event)
    assert later.blocks == view.blocks and later.created == told[0]
    assert [block.in_use for block in later.blocks.values()] == [True, True, False]
    manager.close(kept)
    for number, event in enumerate(queue.drain(), len(told)):
        view.apply(event)
        later.apply(from_json({**event.to_json(), "event_id": number}))
    assert later.blocks == view.blocks and not any(block.in_use for block in view.blocks.values())


def test_a_queue_that_nobody_reads_stays_small_and_makes_no_events(monkeypatch):
    made = []
    real = Stored.of
    monkeypatch.setattr(Stored, "of", staticmethod(lambda *facts: made.append(1) or real(*facts)))
    queue = EventQueue(limit=50)
    manager = BlockManager(16, 2, events=queue)
    for i in range(200):
        manager.close(run(manager, [i, i + 1, i + 2, i + 3]))
        assert queue.told <= 50 and len(queue.backlog) <= 50
    assert not made and queue.lost and not queue.backlog
    queue.drain()
    assert made


def test_the_limit_counts_blocks_not_events():
    queue = EventQueue(limit=5)
    manager = BlockManager(8, 1, events=queue)
    run(manager, [1, 2, 3, 4])
    assert kinds(queue.drain()) == ["created", "stored"]  # 1 + 4
    run(manager, [5, 5, 5, 5])
    assert kinds(queue.drain()) == ["stored"]
    queue = EventQueue(limit=4)
    manager = BlockManager(8, 1, events=queue)
    run(manager, [1, 2, 3, 4])
    assert kinds(queue.drain()) == ["lost", "created", "stored"]


def test_drain_waits_for_an_event_from_another_thread():
    queue = EventQueue()
    manager = BlockManager(4, 1, events=queue)
    queue.drain()
    got: list = []
    waits = threading.Event()
    wait_for = queue.filled.wait_for

    def note(predicate, timeout):
        waits.set()
        return wait_for(predicate, timeout)

    queue.filled.wait_for = note
    reader = threading.Thread(target=lambda: got.extend(queue.drain(timeout=600)), daemon=True)
    reader.start()
    assert waits.wait(30) and not got
    run(manager, [1])
    reader.join(30)
    assert not reader.is_alive() and kinds(got) == ["stored"]
    assert queue.drain(timeout=0.01) == [] and queue.waiting == 0


def test_a_reader_in_another_thread_sees_the_state():
    """The reader drains while the manager works, with a limit that overflows; the last look is the state."""
    queue = EventQueue(limit=20)
    manager = BlockManager(24, 2, events=queue)
    view, done, failed = CacheView(), threading.Event(), []

    def read():
        try:
            while not done.is_set():
                for event in queue.drain(timeout=0.001):
                    view.apply(event)
        except EventOrder as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(1500):
        manager.close(run(manager, [i % 7, i % 5, i % 3, i % 2, i % 11, 0]))
    done.set()
    reader.join(30)
    assert not failed
    for event in queue.drain():
        view.apply(event)
    assert state_seen(view) == state_of(manager)


def test_a_reader_never_sees_half_an_operation():
    """A drain that needs the present state waits until the commit that runs in another thread is over."""
    queue = EventQueue(limit=1)
    got: list = []
    reader = threading.Thread(target=lambda: got.extend(queue.drain()))

    def hash_slowly(parent, tokens):
        if tokens == (2,):  # block 1 is stored, block 2 is not yet
            reader.start()
            reader.join(0.1)
            assert reader.is_alive() and not got
        return block_hash(parent, tokens)

    manager = BlockManager(4, 1, events=queue, hash_block=hash_slowly)
    table = manager.open([1])
    manager.grow(table, 3)
    manager.commit(table, [1, 2, 3], 3)
    reader.join(30)
    assert kinds(got) == ["lost", "created", "stored"] and len(got[2].blocks) == 3


def test_a_woken_parent_is_told_before_its_new_child():
    queue = EventQueue()
    manager = BlockManager(8, 2, events=queue)
    slow = manager.open([1, 2, 3, 4])
    manager.grow(slow, 4)
    manager.close(run(manager, [1, 2]))
    queue.drain()
    manager.commit(slow, [1, 2, 3, 4], 4)
    assert kinds(queue.drain()) == ["updated", "stored"]


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32), limit=st.integers(1, 40), width=st.sampled_from([1, 3, 64]))
def test_the_view_is_the_state_after_any_trace(seed, limit, width):
    random_trace(seed, steps=60, events=EventQueue(limit), hash_block=bits(width))


@pytest.mark.parametrize("silent", [Removed, Stored, Updated])
def test_a_manager_that_keeps_an_event_back_is_seen(monkeypatch, silent):
    emit = BlockManager.emit

    def keep_back(self, make, entries):
        if not make.__qualname__.startswith(silent.__name__):
            emit(self, make, entries)

    monkeypatch.setattr(BlockManager, "emit", keep_back)
    with pytest.raises((EventOrder, AssertionError)):
        random_trace(0, events=EventQueue())


CREATED = Created(0, 0.0, (4,), 1, "r")


def stored(event_id, parent, *names):
    return Stored(event_id, 0.0, parent, tuple(StoredBlock(name, (1,)) for name in names))


IMPOSSIBLE = {
    "no created": [stored(0, None, "a")],
    "starts late": [Created(3, 0.0, (4,), 1, "r")],
    "gap": [CREATED, stored(2, None, "a")],
    "backwards": [CREATED, stored(1, None, "a"), stored(1, None, "b")],
    "unknown parent": [CREATED, stored(1, "x", "a")],
    "unused parent": [
        CREATED,
        stored(1, None, "a"),
        Updated(2, 0.0, ("a",), "in_use", True, False),
        stored(3, "a", "b"),
    ],
    "stored twice": [CREATED, stored(1, None, "a"), stored(2, None, "a")],
    "too many": [CREATED, stored(1, None, "a", "b", "c", "d", "e")],
    "removed unknown": [CREATED, Removed(1, 0.0, ("a",))],
    "removed in use": [CREATED, stored(1, None, "a"), Removed(2, 0.0, ("a",))],
    "removed before its child": [
        CREATED,
        stored(1, None, "a", "b"),
        Updated(2, 0.0, ("b", "a"), "in_use", True, False),
        Removed(3, 0.0, ("a",)),
    ],
    "updated unknown": [CREATED, Updated(1, 0.0, ("a",), "in_use", True, False)],
    "updated from another value": [CREATED, stored(1, None, "a"), Updated(2, 0.0, ("a",), "in_use", False, True)],
    "updated to the same": [CREATED, stored(1, None, "a"), Updated(2, 0.0, ("a",), "in_use", True, True)],
    "updated something else": [CREATED, stored(1, None, "a"), Updated(2, 0.0, ("a",), "priority", True, False)],
    "lost, and no created": [CREATED, Lost(3, 0.0, 2, 1, 2), stored(4, None, "a")],
    "lost from elsewhere": [CREATED, Lost(3, 0.0, 2, 0, 1)],
    "lost and miscounted": [CREATED, Lost(4, 0.0, 2, 1, 2)],
    "unknown kind": [CREATED, kv.Event(1, 0.0)],
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_order_is_refused(name):
    *before, last = IMPOSSIBLE[name]
    view = CacheView()
    for event in before:
        view.apply(event)
    with pytest.raises(EventOrder, match=f"{type(last).__name__.lower()} event {last.event_id} cannot come here"):
        view.apply(last)


def test_the_orders_that_are_possible_are_accepted():
    view = CacheView()
    for event in [
        CREATED,
        stored(1, None, "a", "b"),
        Updated(2, 0.0, ("b", "a"), "in_use", True, False),
        Removed(3, 0.0, ("b", "a")),
        stored(4, None, "a"),
        Lost(7, 0.0, 2, 5, 6),
        Created(8, 0.0, (4,), 1, "r"),
        stored(9, None, "c"),
    ]:
        view.apply(event)
    assert set(view.blocks) == {"c"}


def test_a_queue_goes_on_with_a_new_cache():
    queue = EventQueue()
    run(BlockManager(4, 1, events=queue), [1, 2])
    manager = BlockManager(8, 1, events=queue)
    run(manager, [3])
    view = CacheView()
    for event in queue.drain():
        view.apply(event)
    assert [block.tokens for block in view.blocks.values()] == [(3,)] and view.levels == (8,)


def test_a_queue_without_room_is_refused():
    with pytest.raises(CacheMisuse):
        EventQueue(0)
