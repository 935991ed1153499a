"""Which replica a request goes to: the index follows real caches, and the choice keeps to load and blocks."""

from __future__ import annotations

import pytest
from benchmarks.prefix_routing import at_random, by_prefix, run_trace
from hypothesis import given
from hypothesis import strategies as st

from graft.base.errors import UsageError
from graft.deploy.policy import PROMISED_FOR, PROMISES, PrefixIndex, RoutePolicy
from graft.engine.kv.events import Created, EventQueue, Lost
from graft.engine.kv.manager import BlockManager

BLOCK = 4
PLAIN = RoutePolicy()
A, B = [*range(40)], [*range(100, 140)]


class Cache:
    """A replica's cache, with the index that its events feed."""

    def __init__(self, index, name, blocks=64, fingerprint="m"):
        self.index, self.name, self.queue = index, name, EventQueue()
        self.manager = BlockManager(blocks, BLOCK, fingerprint=fingerprint, events=self.queue)
        self.tell()

    def tell(self):
        for event in self.queue.drain():
            self.index.apply(self.name, event)

    def run(self, tokens):
        table = self.manager.open(tokens)
        assert self.manager.grow(table, len(tokens)) is not None
        self.manager.commit(table, tokens, len(tokens))
        self.manager.close(table)
        self.tell()


def two(**options):
    index = PrefixIndex()
    return index, Cache(index, "a", **options), Cache(index, "b", **options)


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@given(st.lists(st.tuples(st.sampled_from("ab"), prompts), max_size=20), prompts)
def test_the_index_finds_what_the_caches_would(ran, asked):
    index, *caches = two(blocks=10)
    by_name = {cache.name: cache for cache in caches}
    for name, tokens in ran:
        by_name[name].run(tokens)
    for cache in caches:
        assert index.replicas[cache.name].stored == set(cache.manager.stored)
    load = dict.fromkeys(by_name, 0)
    choice = index.choose(asked, load, PLAIN)
    cached = {name: cache.manager.open(asked).cached // BLOCK for name, cache in by_name.items()}
    assert choice.found == cached[choice.replica]
    assert choice.of == max(len(asked) - 1, 0) // BLOCK
    if choice.followed:
        assert choice.found == max(cached.values()) >= PLAIN.least_share * choice.of
    else:
        assert max(cached.values()) < max(PLAIN.least_share * choice.of, 1)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 30), min_size=1),
    st.lists(st.tuples(st.sampled_from("abcd"), prompts), max_size=6),
    prompts,
    st.integers(0, 10),
)
def test_the_chosen_one_may_be_chosen_and_is_never_busier_than_slack_allows(load, ran, asked, slack):
    index = PrefixIndex()
    caches = {name: Cache(index, name) for name in "abc"}  # d has told nothing yet
    for name, tokens in ran:
        if name in caches:
            caches[name].run(tokens)
    choice = index.choose(asked, load, RoutePolicy(slack=slack))
    assert choice.replica in load and load[choice.replica] <= min(load.values()) + slack


def test_it_follows_its_blocks_until_they_are_evicted():
    index, a, _ = two(blocks=10)
    a.run(A)
    assert index.choose(A, {"a": 3, "b": 0}, PLAIN).replica == "a"
    a.run(B)  # takes all ten blocks
    assert not index.choose(A, {"a": 0, "b": 0}, RoutePolicy(least_share=1.0)).followed


def test_a_busy_replica_is_left_alone():
    index, a, _ = two()
    a.run(A)
    assert index.choose(A, {"a": PLAIN.slack, "b": 0}, PLAIN).replica == "a"
    choice = index.choose(A, {"a": PLAIN.slack + 1, "b": 0}, PLAIN)
    assert (choice.replica, choice.followed) == ("b", False)


def test_equals_that_come_together_go_together_and_others_elsewhere():
    """No event has come: the first is promised its blocks."""
    index, *_ = two()
    load = {"a": 0, "b": 0}
    first = index.choose(A, load, PLAIN)
    assert index.choose([*A, 7], load, PLAIN) == type(first)(first.replica, 9, 10, True)
    assert index.choose(B, load, PLAIN).replica != first.replica


def test_a_beginning_that_all_share_attracts_nobody():
    index, a, _ = two()
    a.run(A)
    asked = [*A[:4], *range(200, 236)]  # one block of nine
    assert index.choose(asked, {"a": 0, "b": 0}, PLAIN).replica == "b"
    index, a, _ = two()
    a.run(A)
    assert index.choose(asked, {"a": 0, "b": 0}, RoutePolicy(least_share=0.1)).replica == "a"


def test_promises_end():
    index, *_ = two()
    chosen = index.choose(A, {"a": 0}, PLAIN).replica
    for _ in range(PROMISED_FOR):
        assert index.choose([1], {"b": 0}, PLAIN).found == 0
    assert not index.choose(A, {chosen: 0}, PLAIN).followed
    for first in range(0, PROMISES * BLOCK + 100 * BLOCK, 100 * BLOCK):
        index.choose(range(first, first + 101 * BLOCK), {"a": 0}, PLAIN)
    assert len(index.replicas["a"].promised) <= PROMISES


def test_a_replica_that_is_gone_or_begins_anew_has_nothing():
    index, a, b = two()
    a.run(A)
    index.apply("a", Lost(9, 0.0, 3, 6, 8))
    assert not index.choose(A, {"a": 0}, PLAIN).followed
    index.apply("a", Created(10, 0.0, (64,), BLOCK, a.manager.root))
    assert not index.choose(B, {"a": 0}, PLAIN).followed
    b.run(B)
    index.drop("b")
    assert not index.choose(B, {"b": 0}, PLAIN).followed


def test_replicas_of_two_models_are_told_apart():
    """While a deployment is exchanged."""
    index = PrefixIndex()
    old = Cache(index, "old", fingerprint="one")
    Cache(index, "new", fingerprint="two")
    old.run(A)
    assert index.choose(A, {"new": 0}, PLAIN).found == 0
    assert index.choose(A, {"old": 0}, PLAIN).found == 9


@pytest.mark.parametrize("bad", [{"least_share": 0}, {"least_share": 1.5}, {"slack": -1}])
def test_settings_out_of_bounds_are_refused(bad):
    with pytest.raises(UsageError, match=next(iter(bad))):
        RoutePolicy(**bad)


def test_no_replica_is_an_error():
    with pytest.raises(UsageError, match="no replica"):
        PrefixIndex().choose(A, {}, PLAIN)


def test_twice_as_many_tokens_are_found_as_at_random():
    """20 system prompts, 4 replicas with room for 3 of them each (docs/scale.md)."""
    size = {"replicas": 4, "cached_prompts": 3, "requests": 400}
    base, found = run_trace(at_random, **size), run_trace(by_prefix, **size)
    assert found.hit_rate >= 2 * base.hit_rate
    assert found.busiest < 1.5

    def astray(index, tokens, load, draw):
        """Events that are taken for another replica's lose all of it."""
        right = by_prefix(index, tokens, load, draw)
        return f"r{(int(right[1]) + 1 + draw.randrange(3)) % 4}"

    assert run_trace(astray, **size).hit_rate < 2 * base.hit_rate
