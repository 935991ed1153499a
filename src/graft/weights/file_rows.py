"""A matrix of a GGUF file, in the file's own blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from graft.weights.native_tiles import BLOCK, GGUF_BYTES, GGUF_KIND, SUPER, pack_gguf, unpack
from graft.weights.sources import Box

AT_ONCE = 1024  # rows that are dequantised at a time


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
    def count(self) -> int:
        return len(self.raw if self.order is None else self.order)

    @property
    def nbytes(self) -> int:
        return self.count * self.raw.shape[1]

    @property
    def kind(self) -> str:
        return GGUF_KIND[self.quant]

    @property
    def text(self) -> str:
        return f"{self.source} as {self.quant}" if self.source else self.quant

    @property
    def columns_of_block(self) -> int:
        return SUPER if self.quant == "Q4_K" else BLOCK

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = self.count, self.raw.shape[1] // GGUF_BYTES[self.quant] * self.columns_of_block
        return sizes[::-1] if self.transposed else sizes

    def part(self, axis: int, first: int, last: int) -> FileRows | None:
        """A range of the parameter's axis; None where it begins or ends inside a block."""
        if axis != self.transposed:
            per, size = self.columns_of_block, GGUF_BYTES[self.quant]
            if first % per or last % per:
                return None
            return replace(self, raw=self.raw[:, first // per * size : last // per * size])
        if self.order is None:
            return replace(self, raw=self.raw[first:last])
        return replace(self, order=self.order[first:last])

    def read(self, box: Box, out: Tensor) -> None:
        """The numbers of a box, out of the blocks that it lies in."""
        (first, last), (left, right) = box[::-1] if self.transposed else box
        rows, per, by_rows = (out.t() if self.transposed else out), self.columns_of_block, int(self.transposed)
        blocks = self.part(1 - by_rows, left // per * per, -(-right // per) * per)
        assert blocks is not None
        for start in range(first, last, AT_ONCE):
            end = min(start + AT_ONCE, last)
            some = blocks.part(by_rows, start, end)
            assert some is not None
            wide = unpack(pack_gguf(some.rows, self.quant))
            rows[start - first : end - first].copy_(wide[:, left % per : left % per + right - left])
