"""Host memory for blocks that the device has no room for, and the copies between the two.

    blocks of all tensors ──index_select──▶ staging [n, words] ──one copy a block──▶ slots [slots, words]

A block lies in one piece on the host: 2 MiB of an 8B model in 16 bits, of which a copy takes 40 µs at 50 GB/s, where
its 64 tensors would take a copy each. Everything runs on the stream of the steps, and the host reads none of it, so
nobody waits. The order of moves is kept: a slot may be written again by the next of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor

from graft.base.device_memory import free_memory, is_out_of_memory, parse_size, size_text
from graft.base.errors import OutOfMemory, UsageError
from graft.engine.kv.moves import Copy, Move, Offload, Reload
from graft.engine.kv.tensors import copy_blocks, lazy_zeros
from graft.engine.options import EngineOptions
from graft.ops.layout import on_host

OPTION = "kv_offloading_size"
AT_ONCE = 32  # blocks: the staging memory of an 8B model takes 64 MiB
WORD = torch.int64


def slots_for(asked: int | str, block_bytes: int) -> int:
    """Blocks that the asked host memory holds."""
    size, free = parse_size(asked, OPTION), free_memory(torch.device("cpu"))
    if size < block_bytes:
        raise UsageError(
            f"{OPTION}={asked} holds no block of the key-value cache, which takes {size_text(block_bytes)}"
        )
    if size > free:
        raise OutOfMemory(
            f"{OPTION}: {size_text(size)} of host memory were asked for, and {size_text(free)} are free"
        )
    return size // block_bytes


class HostMemory:
    """Slots for the blocks of these tensors. `move` takes the place of `copy_blocks`."""

    def __init__(self, tensors: Sequence[Tensor], slots: int) -> None:
        self.words = [prod(tensor.shape[1:]) * tensor.itemsize // WORD.itemsize for tensor in tensors]
        self.device = tensors[0].device
        shape = (slots, sum(self.words))
        self.staging = torch.empty((min(AT_ONCE, slots), shape[1]), dtype=WORD, device=self.device)
        self.slots = lazy_zeros(shape, WORD) if self.device.type == "cpu" else pinned(shape)

    @property
    def nbytes(self) -> int:
        return self.slots.nbytes

    def move(self, tensors: Sequence[Tensor], moves: Sequence[Move]) -> None:
        at_once = len(self.staging)
        for kind, run in groupby(moves, type):
            same: list[Any] = list(run)
            if kind is Copy:
                copy_blocks(tensors, same)
                continue
            make = self.offload if kind is Offload else self.reload
            for start in range(0, len(same), at_once):
                make(tensors, same[start : start + at_once])

    def offload(self, tensors: Sequence[Tensor], moves: Sequence[Offload]) -> None:
        staged = self.staging[: len(moves)]
        blocks = self.indices(move.block for move in moves)
        for tensor, part in zip(tensors, staged.split(self.words, dim=1), strict=True):
            part.copy_(self.by_block(tensor).index_select(0, blocks))
        for row, move in zip(staged, moves, strict=True):
            self.slots[move.slot].copy_(row, non_blocking=True)

    def reload(self, tensors: Sequence[Tensor], moves: Sequence[Reload]) -> None:
        staged = self.staging[: len(moves)]
        for row, move in zip(staged, moves, strict=True):
            row.copy_(self.slots[move.slot], non_blocking=True)
        blocks = self.indices(move.block for move in moves)
        for tensor, part in zip(tensors, staged.split(self.words, dim=1), strict=True):
            self.by_block(tensor).index_copy_(0, blocks, part)

    def indices(self, blocks: Iterable[int]) -> Tensor:
        return on_host(list(blocks), self.device).to(self.device, non_blocking=True)

    def by_block(self, tensor: Tensor) -> Tensor:
        """[blocks, words] of [blocks, rows, kv_heads, head_dim]."""
        return tensor.view(torch.uint8).view(len(tensor), -1).view(WORD)


def host_memory(
    tensors: Sequence[Tensor], block_bytes: int, options: EngineOptions, *, ranks: int, recurrent: bool
) -> HostMemory | None:
    """Where it was asked for."""
    if options.kv_offloading_size is None:
        return None
    if recurrent:
        raise UsageError(f"{OPTION}: the states of recurrent layers are not cached by prefix, so no block comes back")
    if ranks > 1:
        raise UsageError(f"{OPTION}: each of {ranks} ranks has a part of a block; it is for one rank so far")
    return HostMemory(tensors, slots_for(options.kv_offloading_size, block_bytes))


def pinned(shape: tuple[int, int]) -> Tensor:
    """Memory that a GPU reads and writes while the host goes on."""
    try:
        return torch.empty(shape, dtype=WORD, pin_memory=True)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        size = size_text(prod(shape) * WORD.itemsize)
        raise OutOfMemory(f"{OPTION}: no {size} of host memory that a GPU can use: {error}; ask for less") from error


def offload_note(memory: HostMemory) -> str:
    """For the report."""
    slots = len(memory.slots)
    line = f"key-value cache offloading: {slots} blocks in host memory, {size_text(memory.nbytes)}"
    if memory.device.type == "cpu":
        line += "; on a CPU that is the memory of the cache itself: kv_cache_memory does the same without copies"
    return line
