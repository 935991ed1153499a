"""Which blocks of the cache are free, and the tensors that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graft.errors import OutOfCache


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps for a token: `kv_heads` keys and values of `head_dim`."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype


class KVCache:
    """Two tensors [blocks, block_size, kv_heads, head_dim] a layer, and the list of free blocks.

    It grows while nothing is in it, so its size follows the requests instead of being guessed beforehand.
    """

    def __init__(self, layers: Sequence[LayerShape], block_size: int, device: torch.device, limit_bytes: int) -> None:
        self.layers = tuple(layers)
        self.block_size = block_size
        self.device = device
        self.limit = max(limit_bytes // self.bytes_per_block, 1)  # blocks that fit into memory
        self.tensors: list[Tensor] = []
        self.free: list[int] = []
        self.size = 0

    @property
    def bytes_per_block(self) -> int:
        per_token = sum(2 * s.kv_heads * s.head_dim * s.dtype.itemsize for s in self.layers)
        return per_token * self.block_size

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def reserve(self, blocks: int) -> None:
        """Makes room for that many blocks, up to the limit of memory. Only an empty cache is made larger."""
        wanted = min(blocks, self.limit)
        if wanted <= self.size or len(self.free) < self.size:
            return
        self.tensors, self.free, self.size = [], [], 0  # the old tensors go before the new ones come
        tensors: list[Tensor] = []
        try:
            for layer in self.layers:
                shape = (wanted, self.block_size, layer.kv_heads, layer.head_dim)
                tensors += [torch.zeros(shape, dtype=layer.dtype, device=self.device) for _ in range(2)]
        except RuntimeError as error:  # torch reports a lack of memory so
            size = wanted * self.bytes_per_block >> 20
            raise OutOfCache(f"no memory for a key-value cache of {wanted} blocks ({size} MiB): {error}") from error
        self.tensors, self.free, self.size = tensors, list(reversed(range(wanted))), wanted

    def allocate(self, blocks: int) -> list[int]:
        if blocks > len(self.free):
            raise OutOfCache(f"{blocks} blocks are needed, {len(self.free)} of {self.size} are free")
        return [self.free.pop() for _ in range(blocks)]

    def release(self, blocks: Sequence[int]) -> None:
        self.free.extend(reversed(blocks))


def memory_limit(device: torch.device, share: float = 0.6) -> int:
    """How many bytes the cache may take: a share of what is free now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * share)
    import os

    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * share)
