"""Names for the content of a block: a hash of its tokens and of everything before them.

A hash is 128 bits of blake2b, written as 32 hexadecimal digits, so that it goes through JSON as it is. It takes in
the 16 bytes of the hash of the block before and the block's token ids, each as 8 bytes, lowest first. The first block
of a sequence follows on the root, which takes in the model's fingerprint and the block size: two models never share a
hash, and whoever knows the root can compute the hashes of a prompt.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

DIGEST_BYTES = 16
OFFLOADED = -1


def root_hash(fingerprint: str, block_size: int) -> str:
    """What the first block of every sequence follows on."""
    return blake2b(f"{block_size}:{fingerprint}".encode(), digest_size=DIGEST_BYTES).hexdigest()


def block_hash(parent: str, tokens: Sequence[int]) -> str:
    content = bytes.fromhex(parent) + struct.pack(f"<{len(tokens)}q", *tokens)
    return blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


@dataclass(slots=True, eq=False)  # an entry is itself: one stored anew under the same hash is another
class CachedBlock:
    """A stored block: what it holds, what it follows on (None: the root), and where it lies. Only that may change."""

    hash: str
    parent: CachedBlock | None = field(repr=False)  # as long as the sequence
    tokens: tuple[int, ...]
    block: int  # of the device; OFFLOADED: in host memory (kv/host.py)

    def holds(self, parent: CachedBlock | None, tokens: tuple[int, ...]) -> bool:
        """Whether it is these tokens after that block. Hashes only find an entry; this decides."""
        return self.parent is parent and self.tokens == tokens
