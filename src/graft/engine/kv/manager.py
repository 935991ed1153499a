"""Which block of the cache belongs to whom: tables, prefix reuse, copy-on-write, eviction.

A block is in one of three states: free (holds nothing), used (in at least one table), or unused (in no table, but
stored: found by its content). Allocation takes a free block, and if there is none the one that was unused longest.
A table's stored blocks are a chain of entries from the root, so the parent of a used entry is used, and `close` lets
go of a table's blocks from the last to the first: children are unused before their parents and evicted before them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from graft.base.errors import CacheMisuse
from graft.engine.kv.audit import audit
from graft.engine.kv.events import Created, EventQueue, Record, Removed, Stored, Updated
from graft.engine.kv.hashing import OFFLOADED, CachedBlock, block_hash, root_hash
from graft.engine.kv.host import HostLevel
from graft.engine.kv.moves import Copy, Move


@dataclass(slots=True, eq=False)
class Table:
    """Where a sequence lies: token p in `blocks[p // block_size]`. `commit` may exchange blocks for equal ones."""

    blocks: list[int]
    cached: int  # tokens that were found in the cache when it was opened
    length: int  # tokens in the cache; writes begin here
    room: int  # tokens that it may come to before it has to grow; -1: closed
    chain: list[CachedBlock] = field(default_factory=list, repr=False)  # of its first blocks, those that are stored

    @property
    def closed(self) -> bool:
        return self.room < 0


@dataclass(frozen=True)
class CacheStats:
    blocks: int
    free: int  # hold nothing
    cached: int  # in no table, but can be found
    used: int  # in a table
    asked_tokens: int  # tokens that sequences were opened with
    reused_tokens: int  # of these, found in the cache
    evictions: int
    host_blocks: int = 0  # slots of host memory
    host_cached: int = 0  # of these, with a block that can be found
    reloaded_tokens: int = 0  # of the reused ones, brought back from there


class BlockManager:
    """Hands out `blocks` blocks of `block_size` tokens. One thread works it; events may be drained by another."""

    def __init__(
        self,
        blocks: int,
        block_size: int,
        *,
        fingerprint: str = "",
        prefix_reuse: bool = True,
        host_blocks: int = 0,
        events: EventQueue | None = None,
        hash_block: Callable[[str, Sequence[int]], str] = block_hash,
    ) -> None:
        if blocks < 1 or block_size < 1:
            raise CacheMisuse(f"a cache of {blocks} blocks of {block_size} tokens; both must be at least 1")
        self.blocks, self.block_size, self.prefix_reuse = blocks, block_size, prefix_reuse
        self.root, self.hash_block = root_hash(fingerprint, block_size), hash_block
        self.refs = [0] * blocks  # tables that a block is in
        self.entries: list[CachedBlock | None] = [None] * blocks  # what a block is stored as
        self.free = list(reversed(range(blocks)))
        self.unused: OrderedDict[int, CachedBlock] = OrderedDict()  # block -> entry, longest unused first
        self.stored: dict[str, CachedBlock] = {}  # hash -> entry; a parent comes before its children
        self.tables: set[Table] = set()
        self.asked_tokens = self.reused_tokens = self.reloaded_tokens = self.evictions = 0
        self.host = HostLevel(host_blocks) if host_blocks and prefix_reuse else None
        self.moves: list[Move] = []  # to be made before the next write, in order
        self.events = events
        self.lock = nullcontext() if events is None else events.lock  # held where what is stored changes
        if events is not None:
            events.attach(self.snapshot)

    @property
    def available(self) -> int:
        """Blocks that can be had: the free ones and those that can be evicted."""
        return len(self.free) + len(self.unused)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def open(self, tokens: Sequence[int], reuse: bool = True) -> Table:
        """A table for a new sequence, with the longest stored prefix of whole blocks, or (reuse=False) nothing.

        One token at least is left to run, because the next token comes from its logits.
        """
        with self.lock:
            chain: list[CachedBlock] = []
            size = self.block_size
            for start in range(0, len(tokens) - size, size) if self.prefix_reuse and reuse else ():
                _, entry = self.find(chain[-1] if chain else None, tuple(tokens[start : start + size]))
                if entry is None or entry.block == OFFLOADED:
                    break
                chain.append(entry)
            self.emit(Updated.used, [entry for entry in chain if self.use(entry)])
            cached = len(chain) * size
            table = Table([entry.block for entry in chain], cached, cached, cached, chain)
            self.tables.add(table)
        self.asked_tokens += len(tokens)
        self.reused_tokens += cached
        return table

    def reload(self, table: Table, tokens: Sequence[int]) -> None:
        """The blocks behind what `open` found that lie in host memory are moved to where the table has grown."""
        if self.host is None or not self.host.kept:
            return
        with self.lock:
            size, chain, found = self.block_size, table.chain, list[CachedBlock]()
            for i in range(len(chain), min((len(tokens) - 1) // size, len(table.blocks))):
                _, entry = self.find(chain[-1] if chain else None, tuple(tokens[i * size : (i + 1) * size]))
                if entry is None:
                    break
                block = table.blocks[i]
                self.moves.append(self.host.give(entry, block))
                self.entries[block] = entry
                chain.append(entry)
                found.append(entry)
            table.cached = table.length = len(chain) * size
            self.emit(Updated.reloaded, found)
            self.emit(Updated.used, found)
        self.reused_tokens += len(found) * size
        self.reloaded_tokens += len(found) * size

    def take_moves(self) -> list[Move]:
        """All that were decided since the last time; whoever takes them makes them before the next write."""
        taken, self.moves = self.moves, []
        return taken

    def grow(self, table: Table, length: int) -> list[Copy] | None:
        """Makes room for `length` tokens, of which those from `table.length` on will be written.

        Returns the copies to make before that write, which are the last of `moves` then, or None where memory does
        not suffice; then nothing has changed.
        """
        if length <= table.room:
            return []
        with self.lock:
            self.must_be_open(table)
            blocks = table.blocks
            shared = [i for i in range(table.length // self.block_size, len(blocks)) if self.is_shared(blocks[i])]
            fresh = self.take(len(shared) + max(self.blocks_for(length) - len(blocks), 0))
            if fresh is None:
                return None
            copies = []
            for i in shared:
                copies.append(Copy(blocks[i], fresh.pop()))
                self.drop(blocks[i])
                blocks[i] = copies[-1].target
            self.moves += copies
            blocks += fresh
            table.room = len(blocks) * self.block_size
            return copies

    def commit(self, table: Table, tokens: Sequence[int], length: int) -> None:
        """tokens[:length] are in the cache now. Blocks that became full can be found from here on."""
        if not table.length <= length <= table.room:
            self.must_be_open(table)
            raise CacheMisuse(
                f"commit of {length} tokens, but {table.length} are committed and there is room for {table.room};"
                " call grow before writing (also after a fork), and never go back"
            )
        if length // self.block_size > len(table.chain) and self.prefix_reuse:
            self.must_follow(table, tokens, length)
            self.store(table, tokens, length)
        table.length = length

    def fork(self, table: Table) -> Table:
        """A second table with the same tokens in the same blocks. Both have to grow before they write again."""
        with self.lock:
            self.must_be_open(table)
            blocks = table.blocks[: self.blocks_for(table.length)]
            for block in blocks:
                self.refs[block] += 1
            table.room = table.length
            other = Table(blocks, table.cached, table.length, table.length, list(table.chain))
            self.tables.add(other)
            return other

    def close(self, table: Table) -> None:
        """Gives the blocks back. Those that are stored can be found until they are evicted."""
        with self.lock:
            self.must_be_open(table)
            self.tables.remove(table)
            self.emit(Updated.unused, [e for block in reversed(table.blocks) if (e := self.drop(block)) is not None])
            table.blocks, table.chain, table.room = [], [], -1

    def stats(self) -> CacheStats:
        used = self.blocks - self.available
        counts = self.asked_tokens, self.reused_tokens, self.evictions
        host = (0, 0) if self.host is None else (self.host.slots, len(self.host.kept))
        return CacheStats(self.blocks, len(self.free), len(self.unused), used, *counts, *host, self.reloaded_tokens)

    def check(self) -> None:
        """Audits every invariant; CacheCorrupt says what does not hold. Looks at every block: for tests."""
        audit(self)

    def find(self, parent: CachedBlock | None, tokens: tuple[int, ...]) -> tuple[str, CachedBlock | None]:
        """The hash of these tokens after that block, and their entry if they are stored."""
        name = self.hash_block(self.root if parent is None else parent.hash, tokens)
        entry = self.stored.get(name)
        return name, entry if entry is not None and entry.holds(parent, tokens) else None

    def store(self, table: Table, tokens: Sequence[int], length: int) -> None:
        """Stores the full blocks that are not yet; one whose content another sequence stored becomes that one, and
        one that lies in host memory is here again.

        Where other content has the same hash the chain ends, and the next commit tries again. If a fork has such a
        block too, it is not stored: the fork need not have the parent, which then could be evicted before it.
        """
        with self.lock:
            size, chain, blocks = self.block_size, table.chain, table.blocks
            woken: list[CachedBlock] = []
            added: list[CachedBlock] = []
            back: list[CachedBlock] = []
            for i in range(len(chain), length // size):
                parent, content = chain[-1] if chain else None, tuple(tokens[i * size : (i + 1) * size])
                name, entry = self.find(parent, content)
                if entry is None:
                    if name in self.stored or self.refs[blocks[i]] > 1:
                        break
                    entry = CachedBlock(name, parent, content, blocks[i])
                    self.stored[name] = self.entries[blocks[i]] = entry
                    added.append(entry)
                elif self.host is not None and entry.block == OFFLOADED:
                    if self.refs[blocks[i]] > 1:
                        break
                    self.host.give(entry, blocks[i])  # computed anew: nothing has to move
                    self.entries[blocks[i]] = entry
                    back.append(entry)
                else:
                    if self.use(entry):
                        woken.append(entry)
                    self.drop(blocks[i])
                    blocks[i] = entry.block
                chain.append(entry)
            self.emit(Updated.reloaded, back)
            self.emit(Updated.used, [*woken, *back])
            self.emit(Stored.of, added)

    def take(self, count: int) -> list[int] | None:
        """That many blocks, each in one table from now on: free ones first, then the longest unused."""
        if count > self.available:
            return None
        taken, evicted = [], []
        for _ in range(count):
            if self.free:
                block = self.free.pop()
            else:
                block, entry = self.unused.popitem(last=False)
                self.entries[block] = None
                evicted.append(entry)
            self.refs[block] = 1
            taken.append(block)
        self.evictions += len(evicted)
        self.forget(evicted if self.host is None else self.offload(self.host, evicted))
        return taken

    def offload(self, host: HostLevel, evicted: Iterable[CachedBlock]) -> list[CachedBlock]:
        """Moves them to host memory; who is forgotten for them."""
        kept, gone = list[CachedBlock](), list[CachedBlock]()
        for entry in evicted:
            move, forgotten = host.keep(entry)
            self.moves.append(move)
            kept.append(entry)
            if forgotten is not None:
                gone.append(forgotten)
        self.emit(Updated.offloaded, kept)
        return gone

    def forget(self, entries: list[CachedBlock]) -> None:
        for entry in entries:
            del self.stored[entry.hash]
        self.emit(Removed.of, entries)

    def use(self, entry: CachedBlock) -> bool:
        """One more table has the entry's block; True if it was unused."""
        self.refs[entry.block] += 1
        return self.unused.pop(entry.block, None) is not None

    def drop(self, block: int) -> CachedBlock | None:
        """One table less has the block; its entry, if it is unused now."""
        self.refs[block] -= 1
        if self.refs[block]:
            return None
        entry = self.entries[block]
        if entry is None:
            self.free.append(block)
        else:
            self.unused[block] = entry
        return entry

    def is_shared(self, block: int) -> bool:
        """Whether a write to it would be seen by someone else: another table, or whoever finds it by its hash."""
        return self.refs[block] > 1 or self.entries[block] is not None

    def must_be_open(self, table: Table) -> None:
        if table not in self.tables:
            state = "is closed" if table.closed else "belongs to another manager"
            raise CacheMisuse(f"the table {state}; open a new one")

    def must_follow(self, table: Table, tokens: Sequence[int], length: int) -> None:
        """Tokens given to commit are the whole sequence of one of our tables, not the last part of it."""
        self.must_be_open(table)
        if len(tokens) < length:
            raise CacheMisuse(f"commit of {length} tokens got {len(tokens)}; pass the sequence from its start")
        last = len(table.chain) * self.block_size
        if table.chain and tuple(tokens[last - self.block_size : last]) != table.chain[-1].tokens:
            raise CacheMisuse(f"commit got other tokens before token {last} than were committed there")

    def emit(self, make: Callable[..., Removed | Stored | Updated], entries: list[CachedBlock]) -> None:
        if entries and self.events is not None:
            self.events.put(make, entries)

    def snapshot(self) -> list[Record]:
        """Events that build the present state from nothing: what is stored, parents first, then what is unused."""
        runs: list[list[CachedBlock]] = []
        for entry in self.stored.values():
            if runs and entry.parent is runs[-1][-1]:
                runs[-1].append(entry)
            else:
                runs.append([entry])
        away = [] if self.host is None else list(self.host.kept)
        levels = (self.blocks,) if self.host is None else (self.blocks, self.host.slots)
        records: list[Record] = [(Created.of, [(levels, self.block_size, self.root)])]
        records += [(Stored.of, run) for run in runs]
        if away or self.unused:
            records.append((Updated.unused, [*away, *self.unused.values()]))
        if away:
            records.append((Updated.offloaded, away))
        return records
