"""Every invariant of the block manager, looked at from outside."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from graft.base.errors import CacheCorrupt
from graft.engine.kv.hashing import OFFLOADED

if TYPE_CHECKING:
    from graft.engine.kv.manager import BlockManager, Table


def audit(manager: BlockManager) -> None:
    """CacheCorrupt with the first invariant that does not hold."""
    audit_blocks(manager)
    audit_entries(manager)
    audit_host(manager)
    for table in manager.tables:
        audit_table(manager, table)


def must(holds: bool, claim: str) -> None:
    if not holds:
        raise CacheCorrupt(claim)


def audit_blocks(manager: BlockManager) -> None:
    """Each block is in one state, and is counted as often as it is in a table."""
    counted = Counter(block for table in manager.tables for block in table.blocks)
    free, unused = set(manager.free), set(manager.unused)
    must(len(free) == len(manager.free), "a block is free twice")
    for block in range(manager.blocks):
        refs, entry = manager.refs[block], manager.entries[block]
        must(refs == counted[block], f"block {block} has {refs} references, but is in {counted[block]} tables")
        must(
            (block in free) + (block in unused) + (refs > 0) == 1,
            f"block {block} is not in one state: free {block in free}, unused {block in unused}, {refs} references",
        )
        must(block not in free or entry is None, f"free block {block} is stored")
        must(block not in unused or manager.unused[block] is entry, f"unused block {block} is not stored as itself")
        must(entry is None or entry.block == block, f"block {block} is stored as another")
        must(entry is None or manager.stored.get(entry.hash) is entry, f"stored block {block} cannot be found")
    must(set(counted) <= set(range(manager.blocks)), "a table has a block that the cache has not")


def audit_entries(manager: BlockManager) -> None:
    """Stored blocks are chains from the root; a used one has a used parent; an unused one goes before its parent."""
    must(manager.prefix_reuse or not manager.stored, "blocks are stored without prefix reuse")
    seen: set[str] = set()
    for name, entry in manager.stored.items():
        parent = entry.parent
        above = manager.root if parent is None else parent.hash
        away = entry.block == OFFLOADED
        found = (
            manager.host is not None and entry in manager.host.kept if away else manager.entries[entry.block] is entry
        )
        must(found, f"entry {name} says block {entry.block}, which is stored otherwise")
        must(name == entry.hash == manager.hash_block(above, entry.tokens), f"entry {name} has another hash")
        must(len(entry.tokens) == manager.block_size, f"entry {name} is not a full block")
        must(parent is None or parent.hash in seen, f"entry {name} comes before its parent")
        must(parent is None or manager.stored.get(parent.hash) is parent, f"the parent of entry {name} is gone")
        seen.add(name)
        if away:
            continue
        must(parent is None or parent.block != OFFLOADED, f"entry {name} is on the device and its parent is not")
        used, parent_used = manager.refs[entry.block] > 0, parent is None or manager.refs[parent.block] > 0
        must(parent_used or not used, f"entry {name} is used and its parent is not")
    age = {block: rank for rank, block in enumerate(manager.unused)}
    for block, entry in manager.unused.items():
        late = entry.parent is not None and age.get(entry.parent.block, manager.blocks) < age[block]
        must(not late, f"entry {entry.hash} would be evicted after its parent")


def audit_host(manager: BlockManager) -> None:
    """Each slot has one block or none; one that is kept is stored, and is forgotten before its parent."""
    if manager.host is None:
        return
    slots = [*manager.host.free, *manager.host.kept.values()]
    must(sorted(slots) == list(range(manager.host.slots)), "a slot of host memory is lost, or has two blocks")
    age = {entry: rank for rank, entry in enumerate(manager.host.kept)}
    for entry, rank in age.items():
        must(
            manager.stored.get(entry.hash) is entry, f"entry {entry.hash} is kept in host memory and cannot be found"
        )
        must(entry.block == OFFLOADED, f"entry {entry.hash} is kept in host memory, and says block {entry.block}")
        late = entry.parent is not None and age.get(entry.parent, manager.host.slots) < rank
        must(not late, f"entry {entry.hash} would be forgotten after its parent")


def audit_table(manager: BlockManager, table: Table) -> None:
    """Its stored blocks are a chain from the root, and what it may write is its own."""
    size, blocks, chain = manager.block_size, table.blocks, table.chain
    must(0 <= table.cached <= table.length <= table.room <= len(blocks) * size, f"lengths of {table} contradict")
    must(len(set(blocks)) == len(blocks), f"{table} has a block twice")
    must(len(chain) <= table.length // size, f"{table} has stored blocks that are not full")
    for i, entry in enumerate(chain):
        must(manager.entries[blocks[i]] is entry, f"block {i} of {table} is not what it is stored as")
        must(entry.parent is (chain[i - 1] if i else None), f"the stored blocks of {table} are no chain")
    must(
        all(manager.entries[b] is None for b in blocks[len(chain) :]),
        f"{table} has a stored block without its parent",
    )
    if table.room > table.length:
        for block in blocks[table.length // size :]:
            alone = manager.refs[block] == 1 and manager.entries[block] is None
            must(alone, f"{table} may write block {block}, which is not its own")
