"""The directory between caches and gateways: late, lost, gone and begun anew."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.deploy import directory as module
from graft.deploy.directory import CacheDirectory, without_tokens
from graft.deploy.policy import PrefixIndex
from graft.engine.kv.events import EventQueue, from_json
from graft.engine.kv.manager import BlockManager

BLOCK = 4


class TellingCache:
    """A replica's cache, as its replica tells it."""

    def __init__(self, name):
        self.name, self.queue = name, EventQueue()
        self.manager = BlockManager(12, BLOCK, events=self.queue)

    def run(self, tokens):
        table = self.manager.open(tokens)
        assert self.manager.grow(table, len(tokens)) is not None
        self.manager.commit(table, tokens, len(tokens))
        self.manager.close(table)

    async def tell(self, directory):
        return await directory.tell(self.name, [without_tokens(one) for one in self.queue.drain()])


async def follow(directory, gateway, index):
    for replica, told in (await directory.follow(gateway, 0.001)).items():
        if told is None:
            index.drop(replica)
        for event in told or ():
            index.apply(replica, from_json(dict(event)))


def holds(index, *caches):
    assert {name: one.stored for name, one in index.replicas.items()} == {
        one.name: set(one.manager.stored) for one in caches
    }


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), min_size=1, max_size=30)),
            st.sampled_from(["tell a", "tell b", "follow x", "follow y"]),
        ),
        max_size=30,
    )
)
def test_gateways_know_what_the_caches_hold(acts):
    async def run():
        directory, caches = CacheDirectory(), {name: TellingCache(name) for name in "ab"}
        indices = {name: PrefixIndex() for name in "xy"}
        for act in acts:
            if isinstance(act, tuple):
                caches[act[0]].run(act[1])
            elif act.startswith("tell"):
                assert await caches[act[-1]].tell(directory) or not caches[act[-1]].queue.next_id
            else:
                await follow(directory, act[-1], indices[act[-1]])
        for cache in caches.values():
            await cache.tell(directory)
        for name, index in indices.items():
            await follow(directory, name, index)
            holds(index, *caches.values())

    asyncio.run(run())


def test_who_does_not_follow_on_what_is_known_begins_anew():
    async def run():
        directory, cache, index = CacheDirectory(), TellingCache("a"), PrefixIndex()
        await cache.tell(directory)
        cache.run([*range(9)])
        directory = CacheDirectory()  # the actor died
        assert not await cache.tell(directory)
        assert not await directory.tell("a", [])
        cache.queue.attach(cache.manager.snapshot)  # not from 0: still refused
        assert not await cache.tell(directory)
        cache.queue = cache.queue.branch()
        assert await cache.tell(directory) and await directory.tell("a", [])
        await follow(directory, "x", index)
        holds(index, cache)

    asyncio.run(run())


def test_a_replica_that_leaves_or_says_nothing_is_dropped(monkeypatch):
    async def run():
        directory, index = CacheDirectory(), PrefixIndex()
        caches = [TellingCache(name) for name in "abc"]
        for cache in caches:
            cache.run([*range(9)])
            await cache.tell(directory)
        await follow(directory, "x", index)
        await directory.leave("a")
        await directory.leave("nobody")
        await follow(directory, "x", index)
        holds(index, *caches[1:])
        directory.caches["b"].heard -= module.QUIET
        assert await directory.tell("c", [])
        await follow(directory, "x", index)
        holds(index, caches[2])
        directory.followers["x"].asked -= module.QUIET
        assert await directory.tell("c", [])
        assert not directory.followers

    asyncio.run(run())


def test_tokens_stay_where_they_are():
    cache = TellingCache("a")
    cache.run([7777, *range(8)])
    told = [without_tokens(one) for one in cache.queue.drain()]
    assert "7777" not in str(told) and any(one["type"] == "stored" and one["blocks"] for one in told)


def test_nothing_new_takes_no_longer_than_patience():
    assert asyncio.run(CacheDirectory().follow("x", 0.001)) == {}
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(CacheDirectory().follow("x", 60), 0.01))
