"""A cache beside the block manager: what every slot of every block would hold, and so what is wrong with a table.

The key of a token depends on all tokens before it, so a slot is written with the whole prefix. A block that is reused
for another prefix, or written while someone else reads it, shows as a wrong prefix in a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

from graft.engine.kv.events import EventQueue
from graft.engine.kv.hashing import OFFLOADED
from graft.engine.kv.manager import BlockManager, Table
from graft.engine.kv.moves import Copy, Move, Offload
from graft.engine.kv.view import CacheView


def bits(count: int) -> Callable:
    """A hash function of so few bits that most blocks collide."""

    def name(parent, tokens):
        digest = blake2b(f"{parent}{list(tokens)}".encode()).digest()
        return str(int.from_bytes(digest, "little") % 2**count)

    return name


@dataclass(eq=False)
class Sequence:
    table: Table
    tokens: list[int]


def state_of(manager: BlockManager) -> dict[str, tuple]:
    """hash -> (hash of the parent, tokens, whether it is used, the level of memory)."""
    return {
        e.hash: (
            None if e.parent is None else e.parent.hash,
            e.tokens,
            e.block >= 0 and manager.refs[e.block] > 0,
            int(e.block == OFFLOADED),
        )
        for e in manager.stored.values()
    }


def state_seen(view: CacheView) -> dict[str, tuple]:
    return {name: (b.parent, b.tokens, b.in_use, b.level) for name, b in view.blocks.items()}


def everything(manager: BlockManager) -> tuple:
    """All that a call that fails has to leave as it was."""
    tables = {id(t): (tuple(t.blocks), t.cached, t.length, t.room, tuple(t.chain)) for t in manager.tables}
    next_id = None if manager.events is None else manager.events.next_id
    places = list(manager.refs), list(manager.free), list(manager.unused), list(manager.stored)
    host = None if manager.host is None else (list(manager.host.kept), list(manager.host.free))
    return tables, places, manager.stats(), next_id, host, list(manager.moves)


def make(slots: list[list], host: list[list], moves: list[Move]) -> None:
    for move in moves:
        if isinstance(move, Copy):
            slots[move.target] = list(slots[move.source])
        elif isinstance(move, Offload):
            host[move.slot] = list(slots[move.block])
        else:
            slots[move.block] = list(host[move.slot])


class Simulation:
    """Drives a manager, does the writes and copies it asks for, and looks at everything after each step."""

    def __init__(self, manager: BlockManager, check: bool = True) -> None:
        self.manager, self.check = manager, check
        self.slots: list[list] = [[None] * manager.block_size for _ in range(manager.blocks)]
        self.host: list[list] = [[None] for _ in range(manager.host.slots if manager.host else 0)]
        self.moves: list[Move] = []  # what a step would make before it writes; many calls may come before one
        self.running: list[Sequence] = []
        self.view = CacheView()
        self.refused = self.copied = 0

    def open(self, tokens: list[int]) -> Sequence:
        table = self.manager.open(tokens)
        assert table.cached == table.length <= max(len(tokens) - 1, 0)
        assert table.cached % self.manager.block_size == 0
        sequence = Sequence(table, list(tokens))
        self.running.append(sequence)
        self.look()
        return sequence

    def reserve(self, sequence: Sequence, length: int) -> bool:
        """Grows and makes the copies. A refusal is just, and changes nothing."""
        manager, table = self.manager, sequence.table
        before = everything(manager)
        copies = manager.grow(table, length)
        if copies is None:
            assert everything(manager) == before
            missing = max(-(-length // manager.block_size) - len(table.blocks), 0)
            assert missing + 1 > manager.available  # one more for a copy
            self.refused += 1
            return False
        self.copied += len(copies)
        self.moves += manager.take_moves()
        self.look()
        return True

    def admit(self, sequence: Sequence) -> None:
        """Room for all of its tokens, and what lies in host memory is not computed again."""
        if self.reserve(sequence, len(sequence.tokens)):
            self.manager.reload(sequence.table, sequence.tokens)
            self.moves += self.manager.take_moves()
            self.look()

    def advance(self, sequence: Sequence, count: int) -> bool:
        """Writes the next tokens and commits them."""
        size, table, tokens = self.manager.block_size, sequence.table, sequence.tokens
        length = table.length + count
        if not self.reserve(sequence, length):
            return False
        make(self.slots, self.host, self.moves)
        self.moves = []
        for p in range(table.length, length):
            self.slots[table.blocks[p // size]][p % size] = tuple(tokens[: p + 1])
        self.manager.commit(table, tokens, length)
        self.look()
        return True

    def fork(self, sequence: Sequence) -> Sequence:
        other = Sequence(self.manager.fork(sequence.table), list(sequence.tokens))
        self.running.append(other)
        self.look()
        return other

    def close(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.manager.close(sequence.table)
        self.look()

    def look(self) -> None:
        """Every table and every stored block holds what it says."""
        if self.check:
            self.manager.check()
        size, slots, host = self.manager.block_size, list(self.slots), list(self.host)
        make(slots, host, self.moves)
        for s in self.running:
            for p in range(s.table.length):
                held = slots[s.table.blocks[p // size]][p % size]
                assert held == tuple(s.tokens[: p + 1]), f"token {p} of {s.table} reads {held}"
        if not self.check:
            return
        prefixes: dict[str, tuple] = {}
        for e in self.manager.stored.values():
            before = () if e.parent is None else prefixes[e.parent.hash]
            prefixes[e.hash] = before + e.tokens
            kept = slots[e.block] if e.block != OFFLOADED else host[self.manager.host.kept[e]]
            assert kept == [prefixes[e.hash][: len(before) + i + 1] for i in range(size)]

    def read_events(self) -> None:
        """The view that is built from events alone is the manager's state."""
        for event in self.manager.events.drain():
            self.view.apply(event)
        assert state_seen(self.view) == state_of(self.manager)

    def finish(self) -> None:
        for sequence in list(self.running):
            self.close(sequence)
        assert self.manager.available == self.manager.blocks


def random_trace(
    seed: int, steps: int = 400, check: bool = True, sizes: tuple[int, ...] = (1, 2, 3, 4), **options
) -> Simulation:
    """Sequences over three tokens, so that prefixes are shared, in a cache that is too small for them."""
    random = Random(seed)
    options = {"events": EventQueue(random.choice([1, 8, 65536])), "fingerprint": "m", **options}
    sim = Simulation(BlockManager(random.randint(4, 20), random.choice(sizes), **options), check)
    for _ in range(steps):
        trace_step(sim, random)
        if sim.manager.events is not None and random.random() < 0.2:
            sim.read_events()
    sim.finish()
    if sim.manager.events is not None:
        sim.read_events()
    return sim


def trace_step(sim: Simulation, random: Random) -> None:
    kind = random.choices(["open", "write", "reserve", "fork", "close", "preempt"], [4, 12, 1, 2, 2, 1])[0]
    if kind == "open" or not sim.running:
        length = random.randint(1, 16)
        sequence = sim.open([int(random.random() < 0.15) for _ in range(length)])
        if sim.manager.host is not None and random.random() < 0.8:
            sim.admit(sequence)
        return
    sequence = random.choice(sim.running)
    if kind == "write":
        waiting = len(sequence.tokens) - sequence.table.length
        if not waiting:  # all is written: a new token was sampled
            sequence.tokens.append(random.randint(0, 2))
            waiting = 1
        if not sim.advance(sequence, random.randint(1, waiting)):
            sim.close(random.choice(sim.running))
    elif kind == "reserve":
        sim.reserve(sequence, sequence.table.length + random.randint(0, 6))
    elif kind == "fork":
        sim.fork(sequence)
    else:
        sim.close(sequence)
        if kind == "preempt":
            again = sim.open(sequence.tokens)
            if sim.manager.host is not None:
                sim.admit(again)


def kinds(events) -> list[str]:
    return [event.to_json()["type"] for event in events]


def run(manager: BlockManager, tokens: list[int]):
    table = manager.open(tokens)
    manager.grow(table, len(tokens))
    manager.commit(table, tokens, len(tokens))
    return table
