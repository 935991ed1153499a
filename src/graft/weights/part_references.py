"""Where the part of a weight that one of several ranks has lies in its checkpoint: runs of rows, or columns of each.

As for whole weights (references.py) nothing is believed of names: what is found was compared byte for byte. A part of
a merged projection is several runs; a part of a matrix that is split by columns lies at equal distances in its file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from graft.weights.mapped import NAMES, Located, content

HEAD = 16  # bytes of a row that are looked for
TRIES = 8  # rows that begin alike
COMPARED = 1 << 24  # bytes at once
MOST_PIECES = 4096  # of one weight: the experts of a layer, with gate and up of each


@dataclass(frozen=True)
class CheckpointBlock:
    """A tensor of a checkpoint: its bytes, and where they lie."""

    file: str
    place: Located
    data: Tensor

    @cached_property
    def rows(self) -> Tensor:
        """Bytes by rows; of one dim it is one row."""
        return self.data.view(-1, width_of(self.place.shape) * self.place.dtype.itemsize)

    @cached_property
    def heads(self) -> Tensor:
        return self.rows[:, :HEAD].contiguous()


@dataclass(frozen=True)
class PlacedRuns:
    """`count` runs of `size` bytes, `step` bytes from one to the next."""

    file: str
    start: int
    size: int
    step: int = 0
    count: int = 1

    @property
    def bytes(self) -> int:
        return self.size * self.count

    def to_data(self) -> list[str | int]:
        whole: list[str | int] = [self.file, self.start, self.size]
        return whole if self.count == 1 else [*whole, self.step, self.count]


def width_of(shape: Sequence[int]) -> int:
    return shape[-1] if shape else 1


def part_pieces(tensor: Tensor, known: Sequence[CheckpointBlock], ranks: int) -> list[PlacedRuns]:
    """What makes up all of the tensor; nothing where something is lacking."""
    if not tensor.numel() or tensor.dtype not in NAMES or not tensor.is_contiguous():
        return []
    width = width_of(tensor.shape) * tensor.element_size()
    rows = torch.frombuffer(content(tensor), dtype=torch.uint8).view(-1, width)
    fitting = [
        one for one in known if one.place.dtype == tensor.dtype and one.rows.shape[1] in (width, width * ranks)
    ]
    found: list[PlacedRuns] = []
    at = 0
    while at < len(rows):
        longest = max(candidates(rows[at:], fitting, ranks), key=lambda each: each[0], default=(0, None))
        count, piece = longest
        if not count or piece is None or len(found) == MOST_PIECES:
            return []
        found.append(piece)
        at += count
    return found


def candidates(rows: Tensor, known: Sequence[CheckpointBlock], ranks: int) -> Iterator[tuple[int, PlacedRuns]]:
    """How many of the rows lie somewhere, and where."""
    width = rows.shape[1]
    head = rows[0, :HEAD]
    for block in known:
        whole = block.rows.shape[1]
        if whole == width:
            begins = (block.heads == head).all(dim=1).nonzero().flatten()[:TRIES].tolist()
            for first in begins:
                count = alike(rows, block.rows[first:])
                if count:
                    yield count, PlacedRuns(block.file, block.place.start + first * width, count * width)
            continue
        for part in range(ranks):
            columns = block.rows[:, part * width : (part + 1) * width]
            count = alike(rows, columns) if torch.equal(columns[0, :HEAD], head) else 0
            if count:
                yield count, PlacedRuns(block.file, block.place.start + part * width, width, whole, count)


def alike(one: Tensor, other: Tensor) -> int:
    """How many rows at the beginning are equal."""
    most, step = min(len(one), len(other)), max(COMPARED // one.shape[1], 1)
    for first in range(0, most, step):
        last = min(first + step, most)
        if not torch.equal(one[first:last], other[first:last]):
            equal = (one[first:last] == other[first:last]).all(dim=1)
            return first + int(equal.logical_not().nonzero()[0])
    return most
