"""Where the numbers of a weight lie in safetensors files, and how a part of them is read without the rest.

A source is a tensor of a file, or several that are joined, stacked, transposed or cut, as loaders do with the tensors
of a checkpoint. A box, one range for each axis, is read from it: with one system call for each run of bytes that lie
together in the file, and no byte beside them.
"""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from graft.base.errors import CheckpointError
from graft.weights.mapped import Located, locations

Box = tuple[tuple[int, int], ...]  # first and last + 1 of every axis
CHUNK = 1 << 24  # bytes that are read before they are converted, or copied to a device


class WeightSource(Protocol):
    """What a weight is read from."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, box: Box, out: Tensor) -> None:
        """Writes the box into `out`, which has its sizes; dtype and device are those of `out`."""
        ...


@dataclass(eq=False)
class WeightFile:
    """An open safetensors file. taken: bytes that were read from it."""

    path: Path
    descriptor: int
    tensors: dict[str, Located]
    taken: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @staticmethod
    def open(path: Path) -> WeightFile:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return WeightFile(path, descriptor, locations(path, descriptor))
        except BaseException:
            os.close(descriptor)
            raise

    def read_runs(self, starts: list[int], size: int, target: memoryview) -> None:
        """Runs of `size` bytes, one after another into the target."""
        for index, start in enumerate(starts):
            done, place = 0, target[index * size : (index + 1) * size]
            while done < size:
                got = os.preadv(self.descriptor, [place[done:]], start + done)
                if got <= 0:
                    raise CheckpointError(
                        f"{self.path} ended at byte {start + done} while it was read; copy it again"
                    )
                done += got
        with self.lock:
            self.taken += size * len(starts)

    def __del__(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True)
class FileSource:
    """A tensor of a file."""

    file: WeightFile
    place: Located

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape

    def read(self, box: Box, out: Tensor) -> None:
        if not out.numel():
            return
        dtype = self.place.dtype
        if out.dtype is dtype and out.device.type == "cpu" and out.is_contiguous():
            self.fetch(box, out)
            return
        axis = next((axis for axis, (first, last) in enumerate(box) if last - first > 1), None)
        if axis is not None and out.numel() * dtype.itemsize > CHUNK:
            (first, last), (start, *_) = box[axis], box[axis]
            step = max(1, (last - first) * CHUNK // (out.numel() * dtype.itemsize))
            for at in range(first, last, step):
                end = min(at + step, last)
                self.read((*box[:axis], (at, end), *box[axis + 1 :]), out.narrow(axis, at - start, end - at))
            return
        between = torch.empty(out.shape, dtype=dtype)
        self.fetch(box, between)
        out.copy_(between)

    def fetch(self, box: Box, target: Tensor) -> None:
        """Into contiguous memory of the file's dtype."""
        starts, count = runs(self.shape, box)
        size = self.place.dtype.itemsize
        memory = target.detach().reshape(-1).view(torch.uint8).numpy().data
        self.file.read_runs([self.place.start + start * size for start in starts], count * size, memory)


def runs(shape: tuple[int, ...], box: Box) -> tuple[list[int], int]:
    """Where the runs of a box begin, in elements, and how long each is: the innermost axes that are whole, and the
    range of the one before them, lie together."""
    inner = len(shape)
    while inner and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    unit = prod(shape[inner:])
    if not inner:
        return [0], unit
    first, last = box[inner - 1]
    strides = [prod(shape[axis + 1 :]) for axis in range(inner)]
    outer = itertools.product(*(range(*pair) for pair in box[: inner - 1]))
    starts = [first * unit + sum(at * stride for at, stride in zip(index, strides, strict=False)) for index in outer]
    return starts, (last - first) * unit


@dataclass(frozen=True)
class JoinedSource:
    """Side by side along an axis."""

    parts: tuple[WeightSource, ...]
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        return (*first[: self.axis], sum(part.shape[self.axis] for part in self.parts), *first[self.axis + 1 :])

    def read(self, box: Box, out: Tensor) -> None:
        (first, last), at = box[self.axis], 0
        for part in self.parts:
            size = part.shape[self.axis]
            start, end = max(first - at, 0), min(last - at, size)
            if start < end:
                own = (*box[: self.axis], (start, end), *box[self.axis + 1 :])
                part.read(own, out.narrow(self.axis, at + start - first, end - start))
            at += size


@dataclass(frozen=True)
class StackedSource:
    """One behind another along a new axis."""

    parts: tuple[WeightSource, ...]
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        each = self.parts[0].shape
        return (*each[: self.axis], len(self.parts), *each[self.axis :])

    def read(self, box: Box, out: Tensor) -> None:
        first, last = box[self.axis]
        own = (*box[: self.axis], *box[self.axis + 1 :])
        for index in range(first, last):
            self.parts[index].read(own, out.select(self.axis, index - first))


@dataclass(frozen=True)
class SwappedSource:
    """With two axes exchanged."""

    whole: WeightSource
    axes: tuple[int, int]

    def swapped(self, values: tuple) -> tuple:
        one, other = self.axes
        found = list(values)
        found[one], found[other] = found[other], found[one]
        return tuple(found)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.swapped(self.whole.shape)

    def read(self, box: Box, out: Tensor) -> None:
        self.whole.read(self.swapped(box), out.transpose(*self.axes))


@dataclass(frozen=True)
class CutSource:
    """A range of an axis."""

    whole: WeightSource
    axis: int
    first: int
    last: int

    @property
    def shape(self) -> tuple[int, ...]:
        of = self.whole.shape
        return (*of[: self.axis], self.last - self.first, *of[self.axis + 1 :])

    def read(self, box: Box, out: Tensor) -> None:
        start, end = box[self.axis]
        own = (*box[: self.axis], (start + self.first, end + self.first), *box[self.axis + 1 :])
        self.whole.read(own, out)


def whole_box(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)
