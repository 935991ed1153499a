"""The tensors that the blocks of the cache live in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from graft.engine.kv.manager import Copy
from graft.ops.paged_cache import raw, rows_of


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps for a token: `kv_heads` keys and values of `head_dim`."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block(self, size: int) -> tuple[int, int, int]:
        """Of keys, or of values, of so many tokens."""
        return rows_of(size, self.head_dim, self.dtype), self.kv_heads, self.head_dim


def bytes_per_block(layers: Sequence[LayerShape], block_size: int) -> int:
    return sum(2 * prod(layer.block(block_size)) * layer.dtype.itemsize for layer in layers)


def narrow_blocks(layers: Sequence[LayerShape], block_size: int) -> int | None:
    """Blocks of which kernels address every number with 32 bits, the padding's not counted. With more they would be
    other kernels, a quarter slower, and which of them run would depend on the memory that happens to be free."""
    largest = max((prod(layer.block(block_size)) for layer in layers), default=0)
    return (1 << 31) // largest - 2 if largest else None


def allocate(layers: Sequence[LayerShape], blocks: int, block_size: int, device: torch.device) -> list[Tensor]:
    """Two tensors [blocks, rows, kv_heads, head_dim] a layer: keys, values (ops/paged_cache.py). All zero: a position
    that is masked is still multiplied by 0, which must not meet a NaN."""
    shapes = [((blocks, *layer.block(block_size)), layer.dtype) for layer in layers for _ in "kv"]
    make = lazy_zeros if device.type == "cpu" else lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device)
    return [make(shape, dtype) for shape, dtype in shapes]


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory when they are first written; torch.zeros takes all of it at once."""
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def copy_blocks(tensors: Sequence[Tensor], copies: Sequence[Copy]) -> None:
    """No target is another copy's source: targets are blocks that were free."""
    if not copies:
        return
    sources = torch.tensor([copy.source for copy in copies], device=tensors[0].device)
    targets = torch.tensor([copy.target for copy in copies], device=tensors[0].device)
    for tensor in map(raw, tensors):
        tensor.index_copy_(0, targets, tensor.index_select(0, sources))
