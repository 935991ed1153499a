"""What is to be done to the cache's memory before the next step writes to it, in the order of decision."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Copy:
    """The content of block `source` is to be copied to block `target` before the next write."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Offload:
    """The content of a block goes to a slot of host memory, before the block is written again."""

    block: int
    slot: int


@dataclass(frozen=True, slots=True)
class Reload:
    """The content of a slot goes to a block, before the block is read or the slot is written again."""

    slot: int
    block: int


Move = Copy | Offload | Reload  # each sees what those before it did
