"""Long lives of the block manager against a model of what every slot holds, and bugs planted to see that it looks."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_model import Simulation, bits, random_trace
from graft.base.errors import CacheCorrupt
from graft.engine.kv.events import EventQueue
from graft.engine.kv.hashing import CachedBlock, block_hash
from graft.engine.kv.host import HostLevel
from graft.engine.kv.manager import BlockManager
from graft.engine.kv.moves import Offload, Reload
from marks import FULL, examples, short


@pytest.mark.parametrize("seed", short(range(24), *range(4)))
def test_random_traces_hold_the_model(seed):
    random_trace(seed)


@pytest.mark.parametrize("seed", short(range(100, 120), *range(100, 105)))
def test_random_traces_with_a_bad_hash_hold_the_model(seed):
    random_trace(seed, hash_block=bits(seed % 5))


@pytest.mark.parametrize("seed", short(range(200, 204), 200, 201))
def test_random_traces_without_prefix_reuse_or_events(seed):
    sim = random_trace(seed, prefix_reuse=False, events=None)
    assert sim.manager.stats().free == sim.manager.blocks


@pytest.mark.parametrize("seed", short(range(300, 330), *range(300, 306)))
def test_random_traces_with_host_memory_hold_the_model(seed):
    random_trace(seed, host_blocks=1 + seed % 9, hash_block=bits(seed % 5) if seed % 3 == 0 else block_hash)


def test_random_traces_with_host_memory_meet_what_they_are_meant():
    sims = [random_trace(seed, sizes=(1, 2), host_blocks=12) for seed in range(1, 5)]
    assert all(sim.manager.reused_tokens > sim.manager.reloaded_tokens > 0 for sim in sims)
    assert sum(sim.manager.reloaded_tokens for sim in sims) > 20


def test_random_traces_meet_what_they_are_meant():
    sims = [random_trace(seed, sizes=(2, 3)) for seed in range(4)]
    assert all(sim.manager.evictions > 20 and sim.manager.reused_tokens > 100 for sim in sims)
    assert all(sim.refused > 5 for sim in sims) and sum(sim.copied for sim in sims) > 20


def found_wrong(expected: type[BaseException] | tuple, seeds: range, **options) -> int:
    """In how many of the traces a planted bug is seen."""
    caught = 0
    for seed in seeds:
        try:
            random_trace(seed, **options)
        except expected:
            caught += 1
    return caught


def test_the_model_sees_a_wrong_block_reused(monkeypatch):
    monkeypatch.setattr(CachedBlock, "holds", lambda self, parent, tokens: True)
    options = {"events": None, "check": False, "hash_block": bits(2)}
    assert found_wrong(AssertionError, range(10), **options) == 10
    assert found_wrong(AssertionError, range(10), **options | {"hash_block": block_hash}) == 0  # the bug is the pair


def test_the_model_sees_a_write_to_a_shared_block(monkeypatch):
    monkeypatch.setattr(BlockManager, "is_shared", lambda self, block: False)
    sizes = (2, 3, 4)  # a block of one token is never half full
    assert found_wrong(AssertionError, range(10), events=None, check=False, sizes=sizes) >= 9
    assert found_wrong(CacheCorrupt, range(10), sizes=sizes) >= 9  # the audit sees it before the write


def close_from_the_head(self, table):
    self.tables.remove(table)
    for block in table.blocks:
        self.drop(block)
    table.room = -1


def leak_a_block(self, table):
    self.tables.remove(table)
    for block in table.blocks[1:]:
        self.drop(block)
    table.room = -1


def never_deduplicate(self, parent, tokens):
    return self.hash_block(self.root if parent is None else parent.hash, tokens), None


def always_store(self, parent, tokens):
    """As if every block were new: an entry takes the place of the one with the same hash."""
    name, entry = FIND(self, parent, tokens)
    if entry is None:
        self.stored.pop(name, None)
    return name, entry


FIND = BlockManager.find


@pytest.mark.parametrize(
    ("method", "wrong", "options"),
    [
        ("close", close_from_the_head, {}),
        ("close", leak_a_block, {}),
        ("find", always_store, {"hash_block": bits(1)}),
    ],
)
def test_the_audit_sees_planted_bugs(monkeypatch, method, wrong, options):
    monkeypatch.setattr(BlockManager, method, wrong)
    assert found_wrong(CacheCorrupt, range(6), events=None, **options) >= 5


def leave_out(kind):
    return lambda self: [move for move in TAKE_MOVES(self) if not isinstance(move, kind)]


def forget_the_last(self, entry):
    """As `keep`, but who came last is forgotten first: a parent before its child."""
    if not self.free:
        self.kept.move_to_end(next(reversed(self.kept)), last=False)
    return KEEP(self, entry)


def keep_the_slot(self, entry, block):
    slot = self.kept.pop(entry)
    entry.block = block
    return Reload(slot, block)


TAKE_MOVES, KEEP = BlockManager.take_moves, HostLevel.keep


@pytest.mark.parametrize(
    ("owner", "method", "wrong", "seen", "least"),
    [
        (BlockManager, "take_moves", leave_out(Offload), AssertionError, 4),
        (BlockManager, "take_moves", leave_out(Reload), AssertionError, 4),
        (HostLevel, "keep", forget_the_last, (CacheCorrupt, KeyError), 5),
        (HostLevel, "give", keep_the_slot, CacheCorrupt, 5),
    ],
)
def test_the_model_sees_planted_bugs_of_host_memory(monkeypatch, owner, method, wrong, seen, least):
    monkeypatch.setattr(owner, method, wrong)
    assert found_wrong(seen, range(6), events=None, sizes=(1, 2), host_blocks=4) >= least


def test_without_lookup_the_traces_reuse_nothing(monkeypatch):
    """The reuse that the traces meet comes from the lookup, not from the harness."""
    monkeypatch.setattr(BlockManager, "find", never_deduplicate)
    assert random_trace(0, events=None).manager.reused_tokens == 0


class Life(RuleBasedStateMachine):
    """Any order of calls: hypothesis finds the shortest one that breaks something."""

    def __init__(self):
        super().__init__()
        self.sim = Simulation(BlockManager(9, 2, events=EventQueue(6)))

    def pick(self, n):
        return self.sim.running[n % len(self.sim.running)]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def open(self, tokens):
        self.sim.open(tokens)

    @precondition(lambda self: self.sim.running)
    @rule(n=st.integers(0, 7), count=st.integers(1, 5), token=st.integers(0, 1))
    def write(self, n, count, token):
        sequence = self.pick(n)
        missing = sequence.table.length + count - len(sequence.tokens)
        sequence.tokens += [token] * missing
        self.sim.advance(sequence, count)

    @precondition(lambda self: self.sim.running)
    @rule(n=st.integers(0, 7), more=st.integers(0, 6))
    def reserve(self, n, more):
        sequence = self.pick(n)
        self.sim.reserve(sequence, sequence.table.length + more)

    @precondition(lambda self: self.sim.running)
    @rule(n=st.integers(0, 7))
    def fork(self, n):
        self.sim.fork(self.pick(n))

    @precondition(lambda self: self.sim.running)
    @rule(n=st.integers(0, 7))
    def close(self, n):
        self.sim.close(self.pick(n))

    @precondition(lambda self: self.sim.running)
    @rule(n=st.integers(0, 7))
    def preempt(self, n):
        sequence = self.pick(n)
        self.sim.close(sequence)
        self.sim.open(sequence.tokens)

    @rule()
    def read_events(self):
        self.sim.read_events()

    @invariant()
    def counts(self):
        stats = self.sim.manager.stats()
        assert stats.free + stats.cached + stats.used == stats.blocks

    def teardown(self):
        self.sim.finish()
        self.sim.read_events()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=examples(120), stateful_step_count=40, deadline=None)


def test_one_long_trace_holds_the_model():
    random_trace(77, steps=5000 if FULL else 1500)
