"""Weights that still lie in their file: the parameter has a shape and memory that nobody has written.

`LazyWeights` knows for the storage of such a parameter what of which file stands behind it: rows of a GGUF file in
their blocks, or floats of safetensors files. Joined rows of blocks are joined weights, and a view of whole rows finds
its own, so that merging layers and undoing it need no numbers. Whoever wants tiles takes the rows' own blocks
(`packed`); whoever wants a part names it, and nothing else is read (`part`); whoever wants numbers has them written
into the parameter (`fill`).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor, UntypedStorage

from graft.base.errors import PackingError
from graft.ir.storage import storage_id
from graft.weights.file_rows import FileRows
from graft.weights.native_tiles import TiledWeight, pack_gguf
from graft.weights.sources import CutSource, JoinedSource, WeightFile, WeightSource, whole_box

READERS = 4  # threads; each reads one weight
SAMPLE = 8  # numbers of a weight that tell it from another


def untouched(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written: pages that the system has promised. torch's own memory is
    touched at its head, and where pages are large (2 MiB) that is half of a small model."""
    count = math.prod(shape)
    if not count:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype).view(tuple(shape))


def hollow(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that takes no memory: untouched pages, or, where a device has none, a storage of no bytes."""
    if device.type == "cpu":
        return untouched(shape, dtype)
    made = torch.empty(tuple(shape), dtype=dtype, device=device)
    if device.type != "meta":
        made.untyped_storage().resize_(0)
    return made


@dataclass(frozen=True)
class SourceEntry:
    """storage: held, so that no other tensor gets its name while this one is known."""

    storage: UntypedStorage
    source: WeightSource


@dataclass
class LazyWeights:
    """What stands behind a parameter. files: those whose bytes are counted."""

    parts: dict[int | None, tuple[FileRows, ...]] = field(default_factory=dict)
    sources: dict[int | None, SourceEntry] = field(default_factory=dict)
    files: tuple[WeightFile, ...] = ()

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self.parts or storage_id(tensor) in self.sources

    def in_blocks(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self.parts

    def put(self, tensor: Tensor, *parts: FileRows) -> None:
        self.parts[storage_id(tensor)] = parts

    def put_source(self, tensor: Tensor, source: WeightSource) -> None:
        self.sources[storage_id(tensor)] = SourceEntry(tensor.untyped_storage(), source)

    def of(self, tensor: Tensor) -> tuple[FileRows, ...]:
        """The rows behind a parameter, or behind a view of whole parts of it."""
        found = self.parts[storage_id(tensor)]
        if found[0].transposed:
            return found
        start = tensor.storage_offset() // tensor.shape[1]
        end = start + tensor.shape[0]
        chosen, at, covered = [], 0, 0
        for part in found:
            if start <= at and at + part.count <= end:
                chosen.append(part)
                covered += part.count
            at += part.count
        if covered != tensor.shape[0]:
            raise PackingError(f"rows {start} to {end} are no whole tensors of the file")
        return tuple(chosen)

    def quants(self, tensor: Tensor) -> tuple[str, ...]:
        """The types in the file, each once."""
        return tuple(dict.fromkeys(part.text for part in self.of(tensor)))

    def joinable(self, tensors: Sequence[Tensor]) -> str | None:
        """Why the rows of these cannot be one weight, or None."""
        known = [self.in_blocks(tensor) for tensor in tensors]
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

    def part(self, tensor: Tensor, axis: int, ranges: Sequence[tuple[int, int]]) -> tuple[Tensor, bool]:
        """The ranges of an axis side by side, lazy as the whole; and whether they are in blocks, if that was."""
        sizes = list(tensor.shape)
        sizes[axis] = sum(last - first for first, last in ranges)
        made = hollow(sizes, tensor.dtype, tensor.device)
        blocks = self.parts.get(storage_id(tensor))
        if blocks is not None and len(blocks) == 1:
            cut = [blocks[0].part(axis, *pair) for pair in ranges]
            rows = [piece for piece in cut if piece is not None]
            by_rows = axis == int(blocks[0].transposed)
            if len(rows) == len(ranges) and (len(rows) == 1 or (by_rows and not axis)):
                self.put(made, *rows)
                return made, True
        source = JoinedSource(blocks, 0) if blocks else self.sources[storage_id(tensor)].source
        parts = tuple(CutSource(source, axis, *pair) for pair in ranges)
        self.put_source(made, parts[0] if len(parts) == 1 else JoinedSource(parts, axis))
        return made, not blocks

    def drop(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self.parts.pop(storage_id(tensor), None)
            self.sources.pop(storage_id(tensor), None)

    def fill(self, tensor: Tensor) -> None:
        """Writes the numbers that stand behind it into the parameter, and forgets where they came from."""
        if self.in_blocks(tensor):
            self.fill_rows(tensor)
        else:
            entry = self.sources[storage_id(tensor)]
            if not entry.storage.nbytes():
                entry.storage.resize_(tensor.nbytes)
            # by `data`: nobody's values are overwritten, and what checks that transforms leave weights alone counts
            # writes (ir/verify.py)
            entry.source.read(whole_box(tuple(tensor.shape)), tensor.data)
        self.drop(tensor)

    def fill_rows(self, tensor: Tensor) -> None:
        start = 0
        for part in self.parts[storage_id(tensor)]:
            shape = part.shape
            # of the whole storage, not of a view's part
            part.read(whole_box(shape), tensor.data.as_strided(shape, (shape[1], 1), start))
            start += math.prod(shape)

    def fill_all(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Fills those that are lazy; which these were."""
        once = {storage_id(tensor): tensor for tensor in tensors if tensor in self}
        if once:
            with ThreadPoolExecutor(READERS, "graft-read") as threads:
                list(threads.map(self.fill, once.values()))
        return list(once.values())

    def fill_floats(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Fills those that lie in their file as they are in memory, but for the dtype."""
        return self.fill_all(tensor for tensor in tensors if storage_id(tensor) in self.sources)

    def sample(self, tensor: Tensor) -> bytes:
        """Some of what stands behind it, from its beginning, without reading the rest."""
        if self.in_blocks(tensor):
            first = self.parts[storage_id(tensor)][0]
            row = 0 if first.order is None else int(first.order[0])
            return first.raw[row, : 4 * SAMPLE].numpy().tobytes()
        source = self.sources[storage_id(tensor)].source
        *outer, inner = source.shape or (1,)
        box = (*((0, min(1, size)) for size in outer), *((0, min(SAMPLE, inner)) for _ in source.shape[-1:]))
        some = torch.empty([last - first for first, last in box], dtype=torch.float32)
        source.read(box, some)
        return some.numpy().tobytes()

    @property
    def taken(self) -> int:
        """Bytes that were read from `files`."""
        return sum(file.taken for file in self.files)
