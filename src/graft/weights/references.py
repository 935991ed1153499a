"""Weights that a compiled engine leaves in their checkpoint: those whose bytes lie there as kernels read them.

Merged projections are several tensors of a checkpoint one after another. Nothing is believed of names: bytes are
compared, and what is found nowhere is packed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graft.base.errors import ArtifactError
from graft.weights.mapped import (
    ALIGN,
    DTYPES,
    NAMES,
    FilePiece,
    Located,
    PlacedTensor,
    content,
    locations,
    map_bytes,
    stream_pieces,
    view,
)
from graft.weights.part_references import CheckpointBlock, PlacedRuns, part_pieces


@dataclass(frozen=True)
class Referred:
    """pieces: in the order in which they make the tensor."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[PlacedRuns, ...]

    @property
    def size(self) -> int:
        return sum(piece.bytes for piece in self.pieces)

    def to_data(self) -> list[Any]:
        return [self.dtype, list(self.shape), [piece.to_data() for piece in self.pieces]]


def find_references(folder: Path, weights: Mapping[str, Tensor], ranks: int = 1) -> dict[str, Referred]:
    """Of the weights that a checkpoint holds; of one of several ranks also parts of what it holds. A file that cannot
    be read as safetensors holds none."""
    known: dict[tuple[Any, ...], list[CheckpointBlock]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for block in blocks(file):
            if block.place.size:
                known.setdefault(block_key(block.data, block.place.dtype, block.place.shape), []).append(block)
    every = [block for some in known.values() for block in some] if ranks > 1 else []
    found = {
        name: tuple(pieces_of(tensor, known) or part_pieces(tensor, every, ranks))
        for name, tensor in weights.items()
        if known
    }
    return {
        name: Referred(NAMES[weights[name].dtype], tuple(weights[name].shape), pieces)
        for name, pieces in found.items()
        if pieces
    }


def blocks(file: Path) -> Iterator[CheckpointBlock]:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        data, found = map_bytes(descriptor), locations(file, descriptor)
    except (ArtifactError, ValueError):
        return
    finally:
        os.close(descriptor)
    for place in found.values():
        yield CheckpointBlock(file.name, place, data[place.start : place.start + place.size])


def block_key(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Of the first row: what may begin at some row of a weight."""
    row = data.numel() // (shape[0] if shape else 1)
    return dtype, shape[1:], bytes(data[:row].numpy())


def pieces_of(tensor: Tensor, known: Mapping[tuple[Any, ...], list[CheckpointBlock]]) -> list[PlacedRuns]:
    """Blocks that make up all of the tensor; none where one is lacking."""
    if not tensor.numel() or tensor.dtype not in NAMES or not tensor.is_contiguous():
        return []
    flat = torch.frombuffer(content(tensor), dtype=torch.uint8)
    row, at, found = flat.numel() // (tensor.shape[0] if tensor.dim() else 1), 0, []
    while at < flat.numel():
        key = tensor.dtype, tuple(tensor.shape[1:]), bytes(flat[at : at + row].numpy())
        rest = flat[at:]
        block = next((one for one in known.get(key, ()) if torch.equal(rest[: one.data.numel()], one.data)), None)
        if block is None:
            return []
        found.append(PlacedRuns(block.file, block.place.start, block.place.size))
        at += block.place.size
    return found


def read_references(
    data: Mapping[str, Any], folder: Path, descriptors: Mapping[str, int], device: torch.device
) -> dict[str, Tensor]:
    """On a CPU a tensor of one aligned piece stays a page of its file; all others are read."""
    made: dict[str, Tensor] = {}
    streamed: dict[str, PlacedTensor] = {}
    files = {name: map_bytes(descriptor) for name, descriptor in descriptors.items()}
    for name, (dtype, shape, listed) in data.items():
        kind, pieces = DTYPES[dtype], [PlacedRuns(*one) for one in listed]
        first = pieces[0]
        if any(piece.count > 1 for piece in pieces):
            runs = torch.cat([in_file(folder, files, piece).reshape(-1) for piece in pieces])
            made[name] = runs.view(kind).view(tuple(shape)).to(device)
        elif device.type == "cpu" and len(pieces) == 1 and first.start % ALIGN == 0:
            place = Located(kind, tuple(shape), first.start, first.size)
            made[name] = view(files[first.file][first.start : first.start + first.size], place)
        else:
            parts = tuple(FilePiece(folder / one.file, descriptors[one.file], one.start, one.size) for one in pieces)
            streamed[name] = PlacedTensor(kind, tuple(shape), parts)
    return made | stream_pieces(streamed, device)


def in_file(folder: Path, files: Mapping[str, Tensor], piece: PlacedRuns) -> Tensor:
    """[count, size] of bytes."""
    data = files[piece.file]
    if piece.start + (piece.count - 1) * piece.step + piece.size > data.numel():
        raise ArtifactError(folder / piece.file, "is shorter than what is to be read of it; compile the model again")
    return data.as_strided((piece.count, piece.size), (piece.step, 1), piece.start)
