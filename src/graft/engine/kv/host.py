"""A second level below the device's blocks: slots of host memory in which evicted blocks stay findable.

    evicted from the device ──Offload──▶ slot ──Reload──▶ a block of the sequence that asks for it
                                          │
                                          └─ no slot is free: the one that came first is forgotten

A block is on one level at a time. Evictions begin at the end of a sequence, so a child comes here before its parent,
and is forgotten before it; what is reloaded begins at the root, so the parent of a block on the device is there, too.
A request that gave way to others finds here what it had computed, as does a prompt that comes again.
"""

from __future__ import annotations

from collections import OrderedDict

from graft.engine.kv.hashing import OFFLOADED, CachedBlock
from graft.engine.kv.moves import Offload, Reload


class HostLevel:
    """Which slot has which block. The manager asks; tensors are moved by kv/offload.py."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.free = list(reversed(range(slots)))
        self.kept: OrderedDict[CachedBlock, int] = OrderedDict()  # entry -> slot, the first to be forgotten first

    def keep(self, entry: CachedBlock) -> tuple[Offload, CachedBlock | None]:
        """A block that is evicted moves here. Also who is forgotten for it, if anybody is."""
        forgotten = None
        if self.free:
            slot = self.free.pop()
        else:
            forgotten, slot = self.kept.popitem(last=False)
        move, entry.block = Offload(entry.block, slot), OFFLOADED
        self.kept[entry] = slot
        return move, forgotten

    def give(self, entry: CachedBlock, block: int) -> Reload:
        """The entry lies in that block of the device from now on. Its slot may be written after the move."""
        slot = self.kept.pop(entry)
        self.free.append(slot)
        entry.block = block
        return Reload(slot, block)
