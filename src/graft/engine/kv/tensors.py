"""The tensors that the blocks of the cache live in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from graft.base.errors import CacheMisuse
from graft.engine.kv.moves import Copy, Move
from graft.ops.paged_cache import SCALE, raw, rows_of
from graft.weights.quantize import FP8


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps for a token: `kv_heads` keys and values of `head_dim`. tensors: 2, or 1 where one row
    stands for both (graft::paged_latent_attention)."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    tensors: int = 2

    @property
    def token_bytes(self) -> int:
        """Without what is left of a block's last row of scales."""
        scale = SCALE.itemsize if self.dtype is FP8 else 0
        return self.tensors * self.kv_heads * (self.head_dim * self.dtype.itemsize + scale)

    def block(self, size: int) -> tuple[int, int, int]:
        """Of keys, of values or of latent rows, of so many tokens."""
        return rows_of(size, self.head_dim, self.dtype), self.kv_heads, self.head_dim


@dataclass(frozen=True)
class CachedTensor:
    """What one tensor of the cache holds, in words, and the number of the layer that it belongs to."""

    layer: int
    what: str


def cached_tensors(layers: Sequence[LayerShape], names: Sequence[str]) -> list[CachedTensor]:
    """Of all layers, in the order of `allocate`. names: of the attention modules."""
    return [
        CachedTensor(index, f"the {what} of {name}")
        for index, (layer, name) in enumerate(zip(layers, names, strict=True))
        for what in (("keys", "values") if layer.tensors == 2 else ("latent rows",))
    ]


def shapes_like(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[LayerShape]:
    """Shapes that `allocate` makes such tensors from, one for each; in another dtype where one is given."""
    return [LayerShape(tensor.shape[2], tensor.shape[3], dtype or tensor.dtype, 1) for tensor in tensors]


def bytes_per_block(layers: Sequence[LayerShape], block_size: int) -> int:
    return sum(layer.tensors * prod(layer.block(block_size)) * layer.dtype.itemsize for layer in layers)


def narrow_blocks(layers: Sequence[LayerShape], block_size: int) -> int | None:
    """Blocks of which kernels address every number with 32 bits, the padding's not counted. With more they would be
    other kernels, a quarter slower, and which of them run would depend on the memory that happens to be free."""
    largest = max((prod(layer.block(block_size)) for layer in layers), default=0)
    return (1 << 31) // largest - 2 if largest else None


def allocate(layers: Sequence[LayerShape], blocks: int, block_size: int, device: torch.device) -> list[Tensor]:
    """Tensors [blocks, rows, kv_heads, head_dim] of each layer: keys and values, or latent rows (ops/paged_cache.py).
    All zero: a position that is masked is still multiplied by 0, which must not meet a NaN."""
    shapes = [((blocks, *layer.block(block_size)), layer.dtype) for layer in layers for _ in range(layer.tensors)]
    make = lazy_zeros if device.type == "cpu" else lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device)
    return [make(shape, dtype) for shape, dtype in shapes]


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory when they are first written; torch.zeros takes all of it at once."""
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def copy_blocks(tensors: Sequence[Tensor], moves: Sequence[Move]) -> None:
    """In their order, as many at once as do not see each other. Other moves are for those who have host memory
    (kv/offload.py)."""
    sources: list[int] = []
    targets: list[int] = []
    for move in moves:
        if not isinstance(move, Copy):
            raise CacheMisuse(
                "blocks are to move between device and host, and this engine has no memory for them there"
            )
        if move.source in targets or move.target in targets:
            copy_at_once(tensors, sources, targets)
            sources, targets = [], []
        sources.append(move.source)
        targets.append(move.target)
    if sources:
        copy_at_once(tensors, sources, targets)


def copy_at_once(tensors: Sequence[Tensor], sources: list[int], targets: list[int]) -> None:
    """All are read before any is written."""
    device = tensors[0].device
    read, written = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
    for tensor in map(raw, tensors):
        tensor.index_copy_(0, written, tensor.index_select(0, read))
