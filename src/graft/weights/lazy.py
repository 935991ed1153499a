"""Weights that still lie in their GGUF file: the parameter has a shape and memory that nobody has written.

`LazyWeights` knows for the storage of such a parameter which rows of which file stand behind it. Joined weights are
joined rows, and a view of whole rows finds its own, so that merging layers and undoing it need no numbers. Whoever
wants tiles takes the rows' own blocks (`packed`); whoever wants numbers has them written into the parameter (`fill`).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graft.base.errors import PackingError
from graft.ir.storage import storage_id
from graft.weights.native_tiles import GGUF_KIND, TiledWeight, pack_gguf, unpack


def untouched(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written: pages that the system has promised. torch's own memory is
    touched at its head, and where pages are large (2 MiB) that is half of a small model."""
    count = math.prod(shape)
    if not count:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype).view(tuple(shape))


@dataclass(frozen=True)
class FileRows:
    """raw: uint8 [n, bytes of a row], in the file's order; order: the file's row for each of ours, where they differ.

    transposed: the parameter is [k, n]. source: the type in the file, where it was rounded to `quant` on the way.
    """

    quant: str
    raw: Tensor
    order: Tensor | None = None
    transposed: bool = False
    source: str = ""

    @property
    def rows(self) -> Tensor:
        return self.raw if self.order is None else self.raw[self.order]

    @property
    def kind(self) -> str:
        return GGUF_KIND[self.quant]

    @property
    def text(self) -> str:
        return f"{self.source} as {self.quant}" if self.source else self.quant


class LazyWeights:
    """Which rows stand behind a parameter."""

    def __init__(self) -> None:
        self.parts: dict[int | None, tuple[FileRows, ...]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self.parts

    def put(self, tensor: Tensor, *parts: FileRows) -> None:
        self.parts[storage_id(tensor)] = parts

    def of(self, tensor: Tensor) -> tuple[FileRows, ...]:
        """The rows behind a parameter, or behind a view of whole parts of it."""
        found = self.parts[storage_id(tensor)]
        if found[0].transposed:
            return found
        start = tensor.storage_offset() // tensor.shape[1]
        end = start + tensor.shape[0]
        chosen, at, covered = [], 0, 0
        for part in found:
            if start <= at and at + len(part.raw) <= end:
                chosen.append(part)
                covered += len(part.raw)
            at += len(part.raw)
        if covered != tensor.shape[0]:
            raise PackingError(f"rows {start} to {end} are no whole tensors of the file")
        return tuple(chosen)

    def quants(self, tensor: Tensor) -> tuple[str, ...]:
        """The types in the file, each once."""
        return tuple(dict.fromkeys(part.text for part in self.of(tensor)))

    def joinable(self, tensors: Sequence[Tensor]) -> str | None:
        """Why the rows of these cannot be one weight, or None."""
        known = [tensor in self for tensor in tensors]
        if not any(known):
            return None
        if not all(known):
            return "some of them lie in blocks in the file and some do not"
        kinds = {part.quant for tensor in tensors for part in self.of(tensor)}
        return None if len(kinds) == 1 else f"they lie in the file as {' and '.join(sorted(kinds))}"

    def packed(self, tensor: Tensor, gated: bool) -> TiledWeight:
        """The file's own blocks in tiles; nothing is dequantised."""
        parts = self.of(tensor)
        raw = parts[0].rows if len(parts) == 1 else torch.cat([part.rows for part in parts])
        return pack_gguf(raw, parts[0].quant, gated)

    def drop(self, tensor: Tensor) -> None:
        self.parts.pop(storage_id(tensor), None)

    def fill(self, tensor: Tensor) -> None:
        """Writes the numbers that the rows stand for into the parameter, and forgets the rows."""
        start = 0
        for part in self.parts[storage_id(tensor)]:
            wide = unpack(pack_gguf(part.rows, part.quant))  # [rows, columns]
            shape = wide.t().shape if part.transposed else wide.shape
            # of the whole storage, not of a view's part; by `data`: nobody's values are overwritten, and what checks
            # that transforms leave weights alone counts writes (ir/verify.py)
            target = tensor.data.as_strided(shape, (shape[1], 1), start)
            target.copy_(wide.t() if part.transposed else wide)
            start += wide.numel()
        self.drop(tensor)

    def fill_all(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Fills those that are lazy; which these were."""
        filled = []
        for tensor in tensors:
            if tensor in self:
                self.fill(tensor)
                filled.append(tensor)
        return filled
