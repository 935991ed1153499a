"""The block manager: reuse, sharing, eviction, and nothing that leaks."""

from __future__ import annotations

import pytest

from cache_model import everything
from graft.base.errors import CacheCorrupt, CacheMisuse, GraftError
from graft.engine.kv.events import EventQueue
from graft.engine.kv.hashing import block_hash, root_hash
from graft.engine.kv.manager import BlockManager
from graft.engine.kv.moves import Copy


def run(manager: BlockManager, tokens: list[int]):
    """A table with all of these tokens in the cache."""
    table = manager.open(tokens)
    assert manager.grow(table, len(tokens)) == []
    manager.commit(table, tokens, len(tokens))
    return table


def test_a_prefix_is_reused_while_it_runs_and_after_close():
    manager = BlockManager(16, 4)
    first = run(manager, list(range(10)))
    second = manager.open(list(range(10)))
    assert second.cached == 8 and second.blocks == first.blocks[:2]
    manager.close(first)
    manager.close(second)
    third = manager.open([0, 1, 2, 3, 9, 9, 9, 9, 9])
    assert third.cached == 4
    assert manager.stats().reused_tokens == 12 and manager.stats().asked_tokens == 29
    manager.check()


def test_one_token_at_least_is_left_to_run():
    manager = BlockManager(16, 4)
    manager.close(run(manager, list(range(8))))
    assert manager.open(list(range(8))).cached == 4
    assert manager.open(list(range(9))).cached == 8
    assert manager.open([]).cached == 0


def test_a_block_that_is_not_full_or_not_committed_is_not_found():
    manager = BlockManager(16, 4)
    tokens = list(range(12))
    table = manager.open(tokens)
    manager.grow(table, 12)
    assert manager.open(tokens).cached == 0
    manager.commit(table, tokens, 7)
    assert manager.open(tokens).cached == 4


def test_a_block_is_found_only_after_the_same_prefix():
    manager = BlockManager(16, 2)
    run(manager, [1, 1, 2, 2, 3, 3])
    assert manager.open([2, 2, 3, 3, 0]).cached == 0
    assert manager.open([1, 1, 3, 3, 0]).cached == 2


def test_equal_blocks_are_stored_once():
    manager = BlockManager(16, 4)
    tokens = list(range(9))
    a, b = manager.open(tokens), manager.open(tokens)
    for table in (a, b):
        manager.grow(table, 9)
    assert not set(a.blocks) & set(b.blocks)
    for table in (a, b):
        manager.commit(table, tokens, 9)
    assert a.blocks[:2] == b.blocks[:2] and a.blocks[2] != b.blocks[2]
    assert manager.available == 16 - 4
    manager.check()


def test_the_longest_unused_goes_first_and_free_blocks_before_it():
    manager = BlockManager(4, 1)
    for token in (1, 2, 3):
        manager.close(run(manager, [token]))
    manager.close(run(manager, [1, 9]))  # uses 1 again; 9 takes the free block
    assert [entry.tokens for entry in manager.unused.values()] == [(2,), (3,), (9,), (1,)]
    table = manager.open([7])
    manager.grow(table, 1)
    assert manager.open([2, 0]).cached == 0 and manager.open([3, 0]).cached == 1
    assert manager.evictions == 1
    manager.check()


def test_children_are_evicted_before_their_parents():
    manager = BlockManager(6, 1)
    manager.close(run(manager, [1, 2, 3]))
    manager.close(run(manager, [1, 2, 4]))
    assert [entry.tokens[0] for entry in manager.unused.values()] == [3, 4, 2, 1]
    table = manager.open([9, 9, 9])
    manager.grow(table, 3)  # two free, one evicted
    assert manager.open([1, 2, 3, 0]).cached == 2
    manager.check()


def test_grow_is_all_or_nothing():
    events = EventQueue()
    manager = BlockManager(4, 2, events=events)
    manager.close(run(manager, [1, 2, 3, 4]))
    table = manager.open([1, 2, 9])
    before = everything(manager)
    assert manager.grow(table, 9) is None
    assert everything(manager) == before
    assert manager.grow(table, 8) == [] and manager.available == 0
    manager.check()


def test_a_shared_block_is_copied_before_it_is_written():
    manager = BlockManager(8, 4)
    table = run(manager, list(range(6)))
    other = manager.fork(table)
    assert other.blocks == table.blocks and other.blocks is not table.blocks
    shared = table.blocks[1]
    copies = manager.grow(other, 7)
    assert copies == [Copy(shared, other.blocks[1])] and other.blocks[1] != shared == table.blocks[1]
    assert manager.grow(table, 7) == []  # it is alone now
    manager.check()


def test_fork_at_a_block_boundary_copies_nothing():
    manager = BlockManager(8, 4)
    table = run(manager, list(range(8)))
    other = manager.fork(table)
    assert manager.grow(table, 9) == manager.grow(other, 9) == []
    assert table.blocks[:2] == other.blocks[:2] and table.blocks[2] != other.blocks[2]


def test_no_memory_for_the_copy_changes_nothing():
    manager = BlockManager(2, 4)
    table = run(manager, list(range(6)))
    other = manager.fork(table)
    before = everything(manager)
    assert manager.grow(other, 7) is None
    assert everything(manager) == before
    manager.close(other)
    assert manager.grow(table, 7) == []


def test_a_stored_block_is_copied_even_if_no_one_else_has_it():
    """No order of calls comes to this; a table that was set back would."""
    manager = BlockManager(4, 4)
    table = run(manager, [1, 2, 3, 4])
    stored = table.blocks[0]
    table.length = table.room = 2
    assert manager.grow(table, 3) == [Copy(stored, table.blocks[0])] and table.blocks[0] != stored


def test_room_from_before_a_fork_is_no_permission_to_write():
    manager = BlockManager(8, 4)
    table = run(manager, [1, 2])
    manager.grow(table, 3)
    manager.fork(table)
    with pytest.raises(CacheMisuse, match="fork"):
        manager.commit(table, [1, 2, 3], 3)


def test_without_prefix_reuse_nothing_is_stored():
    manager = BlockManager(8, 2, prefix_reuse=False)
    manager.close(run(manager, [1, 2, 3, 4, 5]))
    assert manager.open([1, 2, 3, 4, 5]).cached == 0
    assert manager.stats().cached == 0 and manager.stats().free == 8
    manager.check()


def test_a_hash_covers_model_block_size_order_and_prefix():
    roots = {root_hash("a", 16), root_hash("b", 16), root_hash("a", 32), root_hash("", 16), root_hash("1", 6)}
    assert len(roots) == 5
    names = {block_hash(root, tokens) for root in roots for tokens in [(1, 2), (2, 1), (258, 0), (1, 2, 0)]}
    assert len(names) == 20 and all(len(name) == 32 for name in names)
    a, b = (BlockManager(4, 2, fingerprint=name) for name in "ab")
    run(a, [1, 2])
    run(b, [1, 2])
    assert not set(a.stored) & set(b.stored)


def test_hashes_are_the_same_in_every_process():
    """Others compute them too, so they are an interface."""
    assert root_hash("model", 16) == "1641371afc80f5c9b669b94fea8fa2ea"
    assert block_hash("1641371afc80f5c9b669b94fea8fa2ea", range(16)) == "60ea2355bc80f5d2eeba2c2d0f4b39a4"


def test_collisions_mean_less_reuse_never_wrong_reuse():
    manager = BlockManager(8, 2, hash_block=lambda parent, tokens: "same")
    first = run(manager, [1, 2, 3, 4])
    assert manager.open([1, 2, 3, 4, 5]).cached == 2  # the second block could not be stored
    assert manager.open([3, 4, 5]).cached == 0
    other = run(manager, [5, 6, 7, 8])
    assert manager.open([5, 6, 0]).cached == 0
    manager.check()
    for table in list(manager.tables - {other}):
        manager.close(table)
    assert first.closed
    table = manager.open([9] * 12)
    assert manager.grow(table, 12) == [] and not manager.stored  # the only stored block goes: its name is free
    manager.close(table)
    manager.grow(other, 5)
    manager.commit(other, [5, 6, 7, 8, 9], 5)
    assert manager.open([5, 6, 0]).cached == 2
    manager.check()


def test_a_block_that_a_fork_has_without_its_parent_is_not_stored():
    """Two tables share blocks that a collision kept from being stored; then one of them finds a stored parent."""
    manager = BlockManager(8, 1, hash_block=lambda parent, tokens: "same" if tokens in [(1,), (9,)] else f"{tokens}")
    blocker = run(manager, [9])
    table = run(manager, [1, 2])
    other = manager.fork(table)
    manager.close(blocker)
    filler = manager.open([])
    assert manager.grow(filler, 6) == [] and not manager.stored
    manager.close(filler)
    manager.close(run(manager, [1]))  # stored now, in a block of its own
    manager.grow(table, 3)
    manager.commit(table, [1, 2, 3], 3)
    assert table.blocks[0] != other.blocks[0] and table.blocks[1] == other.blocks[1]
    manager.close(table)
    manager.check()
    manager.grow(other, 3)
    manager.commit(other, [1, 2, 3], 3)  # it is alone now: its blocks are stored
    assert len(other.chain) == 3
    manager.check()


@pytest.mark.parametrize("call", ["grow", "commit", "fork", "close"])
def test_a_closed_table_cannot_be_used(call):
    manager = BlockManager(8, 2)
    table = run(manager, [1, 2, 3])
    manager.close(table)
    assert table.closed and table.blocks == []
    calls = {
        "grow": lambda t: manager.grow(t, 1),
        "commit": lambda t: manager.commit(t, [1, 2, 3], 3),
        "fork": manager.fork,
        "close": manager.close,
    }
    with pytest.raises(CacheMisuse, match="closed"):
        calls[call](table)
    elsewhere = BlockManager(8, 2)
    stranger = elsewhere.open([1, 2, 3])
    if call == "commit":  # asks whose it is when a block is full
        elsewhere.grow(stranger, 3)
    with pytest.raises(CacheMisuse, match="another manager"):
        calls[call](stranger)
    manager.check()
    elsewhere.check()


def test_a_commit_that_cannot_be_meant_is_refused_and_changes_nothing():
    manager = BlockManager(8, 2)
    tokens = [1, 2, 3, 4, 5, 6]
    table = manager.open(tokens)
    manager.grow(table, 6)
    manager.commit(table, tokens, 2)
    before = everything(manager)
    for wrong, length in [(tokens, 1), (tokens, 7), ([3, 4], 4), ([9, 9, 3, 4], 4)]:
        with pytest.raises(CacheMisuse):
            manager.commit(table, wrong, length)
        assert everything(manager) == before
    manager.commit(table, tokens, 6)
    manager.check()


@pytest.mark.parametrize(("blocks", "size"), [(0, 16), (4, 0)])
def test_an_empty_cache_is_refused(blocks, size):
    with pytest.raises(CacheMisuse):
        BlockManager(blocks, size)


def test_a_table_as_long_as_a_long_context_is_no_deep_recursion():
    manager = BlockManager(1500, 1)
    table = run(manager, list(range(1500)))
    manager.check()
    assert "blocks" in repr(table) and repr(table.chain)


def test_errors_are_graft_errors():
    assert issubclass(CacheMisuse, GraftError) and issubclass(CacheCorrupt, GraftError)
