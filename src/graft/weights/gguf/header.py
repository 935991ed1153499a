"""The header of a GGUF file, read with a bound on everything: whatever it claims is checked before others read it.

    "GGUF" · version u32 · tensors u64 · entries u64
    entries    key · type u32 · value          string: length u64, bytes; array: type u32, length u64, values
    tensors    name · dims u32 · dims × u64 · type u32 · offset u64
    padding to general.alignment (32), then the tensors' bytes

The gguf package loops as often as a damaged count says, over bytes that are not there.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from graft.base.errors import CheckpointError

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MOST_DIMS = 4  # GGML_MAX_DIMS


@dataclass(frozen=True)
class StringArray:
    """An array of strings, of which only the length is kept."""

    count: int


@dataclass(frozen=True)
class GgufTensor:
    name: str
    kind: int
    shape: tuple[int, ...]  # the last is contiguous, as in torch
    offset: int  # from the end of the header
    size: int


@dataclass(frozen=True)
class Header:
    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]
    start: int  # where the tensors' bytes begin

    @property
    def end(self) -> int:
        return self.start + max((tensor.offset + tensor.size for tensor in self.tensors), default=0)


class Cursor:
    """Reads on through bytes; what lies beyond their end is an error."""

    def __init__(self, data: Any, path: Path) -> None:
        self.data, self.path, self.at, self.size = data, path, 0, len(data)

    def damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is truncated or damaged: {problem}; copy it again")

    def skip(self, count: int) -> int:
        begin = self.at
        if count > self.size - begin:
            raise self.damaged(f"{count} bytes are claimed at byte {begin}, and {self.size - begin} are left")
        self.at += count
        return begin

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        begin = self.skip(count * struct.calcsize(code))
        return struct.unpack_from(f"<{count}{code}", self.data, begin)

    def text(self) -> str:
        (length,) = self.numbers("Q")
        begin = self.skip(length)
        try:
            return self.data[begin : self.at].decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"a name at byte {begin} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.numbers(SCALARS[kind])[0]
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise self.damaged(f"a value at byte {self.at} has the unknown type {kind}")
        inner, (count,) = self.numbers("I")[0], self.numbers("Q")
        if inner in SCALARS:
            return self.numbers(SCALARS[inner], count)
        if inner != STRING:
            raise self.damaged(f"an array at byte {self.at} is of type {inner}")
        if count > self.size // 8:
            raise self.damaged(f"an array at byte {self.at} claims {count} strings")
        for _ in range(count):
            self.skip(self.numbers("Q")[0])
        return StringArray(count)


def read_gguf_header(path: Path) -> Header:
    """Raises CheckpointError unless the file is GGUF and holds every byte that its header claims."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(f"{path} is not a GGUF file (its first bytes are not 'GGUF')")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return parse(Cursor(data, path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def parse(cursor: Cursor) -> Header:
    cursor.skip(4)
    (version,) = cursor.numbers("I")
    if version not in (2, 3):
        kind = "is big-endian" if version & 0xFFFF == 0 and version else f"has version {version}"
        raise CheckpointError(f"{cursor.path} {kind}, but graft reads little-endian GGUF of version 2 and 3")
    tensors, entries = cursor.numbers("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.text()
        if key in metadata:
            raise cursor.damaged(f"it has {key!r} twice")
        metadata[key] = cursor.value(cursor.numbers("I")[0])
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.damaged(f"general.alignment is {alignment!r}, not a power of two")
    stored = [read_stored(cursor, alignment) for _ in range(tensors)]
    header = Header(metadata, tuple(stored), -(-cursor.at // alignment) * alignment)
    if header.end > cursor.size:
        raise CheckpointError(
            f"{cursor.path} is truncated: {cursor.size} bytes instead of {header.end}; copy it again"
        )
    check_apart(cursor, stored)
    return header


@cache
def block_sizes() -> dict[int, tuple[int, int]]:
    """Numbers and bytes of a block, by GGML type."""
    from gguf import GGML_QUANT_SIZES

    return {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}


def read_stored(cursor: Cursor, alignment: int) -> GgufTensor:
    name, (dims,) = cursor.text(), cursor.numbers("I")
    if not 1 <= dims <= MOST_DIMS:
        raise cursor.damaged(f"{name!r} has {dims} dimensions")
    shape = cursor.numbers("Q", dims)[::-1]
    kind, (offset,) = cursor.numbers("I")[0], cursor.numbers("Q")
    if kind not in block_sizes():
        raise CheckpointError(f"{cursor.path}: {name!r} is of the unknown GGML type {kind}; use another file")
    columns, size = block_sizes()[kind]
    if shape[-1] % columns or offset % alignment:
        raise cursor.damaged(f"{name!r} has rows of {shape[-1]} and begins at {offset}, off its blocks")
    return GgufTensor(name, kind, shape, offset, prod(shape) // columns * size)


def check_apart(cursor: Cursor, stored: list[GgufTensor]) -> None:
    """No name twice, no byte twice."""
    names: set[str] = set()
    end, last = 0, ""
    for tensor in sorted(stored, key=lambda one: (one.offset, one.size)):
        if tensor.name in names:
            raise cursor.damaged(f"it has the tensor {tensor.name!r} twice")
        if tensor.offset < end:
            raise cursor.damaged(f"the tensors {last!r} and {tensor.name!r} overlap")
        names.add(tensor.name)
        end, last = tensor.offset + tensor.size, tensor.name
