"""Weights in one file, in the order and form in which kernels read them: mapped on a CPU, streamed to a GPU.

The file is a safetensors file. Its data begins at a whole page, and every tensor at a multiple of 64 bytes, as
torch's own memory does: padding stands in tensors of its own, `.padding.N`, since the format allows no gaps. Mapped
pages are read when they are needed, are shared by all processes that map the file, and go first when memory is short.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graft.base.errors import ArtifactError

PAGE, ALIGN = 4096, 64
LARGEST_HEADER = 1 << 26
PADDING = ".padding."
CHUNK = 1 << 24  # bytes that one thread reads before they go to a GPU
READERS = 8
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Located:
    """Where a tensor lies in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class FilePiece:
    """Bytes of an open file."""

    path: Path
    descriptor: int
    start: int
    size: int


@dataclass(frozen=True)
class PlacedTensor:
    """A contiguous tensor, whose bytes are those of the pieces one after another."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[FilePiece, ...]


def write_mapped(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Written tensor by tensor: no more than one is copied at a time."""
    entries: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise ArtifactError(path.name, f"cannot be written: {name} is {tensor.dtype}, which the format has not")
        entries[name] = entry(NAMES[tensor.dtype], tensor.shape, at, tensor.nbytes)
        at += tensor.nbytes
        if at % ALIGN:
            gap = -at % ALIGN
            entries[f"{PADDING}{len(entries)}"] = entry("U8", (gap,), at, gap)
            at += gap
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 8) % PAGE)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for tensor in tensors.values():
            file.write(content(tensor))
            file.write(bytes(-tensor.nbytes % ALIGN))


def entry(dtype: str, shape: Any, start: int, size: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + size]}


def content(tensor: Tensor) -> Any:
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def locations(path: Path, descriptor: int) -> dict[str, Located]:
    """Of every tensor, held against the size of the file."""
    whole = os.fstat(descriptor).st_size
    (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0).ljust(8, b"\0"))
    if not 2 <= length <= min(LARGEST_HEADER, whole - 8):
        raise ArtifactError(path, f"has a header of {length} bytes in a file of {whole}; it is damaged")
    try:
        header = json.loads(os.pread(descriptor, length, 8))
        return dict(located(header, 8 + length, whole))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(path, f"has a header that cannot be read ({error}); it is damaged") from error


def located(header: Mapping[str, Any], base: int, whole: int) -> Iterator[tuple[str, Located]]:
    for name, given in header.items():
        if name == "__metadata__" or name.startswith(PADDING):
            continue
        dtype, shape, (start, end) = DTYPES[given["dtype"]], tuple(given["shape"]), given["data_offsets"]
        if not 0 <= start <= end <= whole - base or math.prod(shape) * dtype.itemsize != end - start:
            raise ValueError(f"{name} lies at {start} to {end}, which is no {dtype} {list(shape)} of this file")
        yield name, Located(dtype, shape, base + start, end - start)


def map_tensors(path: Path, descriptor: int) -> dict[str, Tensor]:
    """Every tensor where it lies in the file. Writing to one changes a copy of its page, never the file."""
    found = locations(path, descriptor)
    data = map_bytes(descriptor)
    return {name: view(data[one.start : one.start + one.size], one) for name, one in found.items()}


def map_bytes(descriptor: int) -> Tensor:
    """A file as bytes; the mapping stays as long as a tensor of it is there."""
    mapped = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def view(data: Tensor, one: Located) -> Tensor:
    return data.view(one.dtype).view(one.shape)


def stream_tensors(
    path: Path, descriptor: int, device: torch.device, keep: Callable[[str], bool] = lambda _: True
) -> dict[str, Tensor]:
    """Every tensor of a file in the memory of a device."""
    found = {name: one for name, one in locations(path, descriptor).items() if keep(name)}
    return stream_pieces(
        {
            name: PlacedTensor(one.dtype, one.shape, (FilePiece(path, descriptor, one.start, one.size),))
            for name, one in found.items()
        },
        device,
    )


def stream_pieces(found: Mapping[str, PlacedTensor], device: torch.device) -> dict[str, Tensor]:
    """Several threads read into pinned memory and copy from there, so that the host holds READERS chunks and no
    second copy of the weights."""
    made = {name: torch.empty(one.shape, dtype=one.dtype, device=device) for name, one in found.items()}
    jobs = [job for name, one in found.items() for job in chunks(one, made[name])]
    lanes = [jobs[lane::READERS] for lane in range(READERS)]

    def read(lane: list[tuple[FilePiece, Tensor]]) -> None:
        if not lane:
            return
        pinned = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=device.type == "cuda")
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        for piece, target in lane:
            read_into(piece.path, piece.descriptor, pinned.data_ptr(), piece.start, piece.size)
            copy(pinned[: piece.size], target, stream)

    with ThreadPoolExecutor(READERS, "graft-read") as threads:
        list(threads.map(read, lanes))
    return made


def chunks(one: PlacedTensor, made: Tensor) -> Iterator[tuple[FilePiece, Tensor]]:
    """What one thread reads at a time, and where it goes."""
    if not made.numel():
        return
    flat, done = made.reshape(-1).view(torch.uint8), 0
    for piece in one.pieces:
        for at in range(0, piece.size, CHUNK):
            count = min(CHUNK, piece.size - at)
            yield replace(piece, start=piece.start + at, size=count), flat[done : done + count]
            done += count


def copy(source: Tensor, target: Tensor, stream: Any) -> None:
    """And waits: the next chunk is read into the same memory. Other threads copy meanwhile."""
    if stream is None:
        target.copy_(source)
        return
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    stream.synchronize()


def read_into(path: Path, descriptor: int, address: int, start: int, count: int) -> None:
    done = 0
    memory = (ctypes.c_char * count).from_address(address)
    target = memoryview(memory).cast("B")
    while done < count:
        got = os.preadv(descriptor, [target[done:]], start + done)
        if got <= 0:
            raise ArtifactError(path, f"ended at byte {start + done} while it was read; copy the folder again")
        done += got
