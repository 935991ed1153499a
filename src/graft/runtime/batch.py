"""A step's tokens, packed into one row, and where they lie in the cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from graft.runtime.scheduler import Plan


@dataclass(frozen=True)
class Batch:
    """The graph's inputs, in its order (see insert_kv_cache)."""

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T]
    logits_index: Tensor  # [n]: the last token of each sequence
    slots: Tensor  # [T]: block * block_size + place in the block
    rows: Tensor  # [T]: which sequence a token belongs to
    block_tables: Tensor  # [n, m]
    starts: Tensor  # [n + 1]: first token of each sequence in the row
    lengths: Tensor  # [n]: tokens of each sequence, the new ones included
    spans: Tensor  # [n, 2], on the CPU: new tokens and all tokens of each sequence; kernels need not wait for sizes

    def inputs(self) -> list[Tensor]:
        return [
            self.input_ids, self.position_ids, self.logits_index, self.slots, self.rows, self.block_tables,
            self.starts, self.lengths, self.spans,
        ]  # fmt: skip


@dataclass
class Lists:
    """The same on the host, without padding."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    lengths: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)

    def padded_tables(self) -> tuple[list[int], int]:
        """[n * m], and m. Padding that is read and masked must not be another's: a NaN there would not be hidden."""
        longest = max(map(len, self.tables))
        return [one for each in self.tables for one in each + each[:1] * (longest - len(each))], longest

    @property
    def ends(self) -> list[int]:
        return [start - 1 for start in self.starts[1:]]


def lists_of(plan: Plan, block_size: int) -> Lists:
    """The next `counts[i]` tokens of requests[i], i = 0…n-1."""
    found = Lists()
    for row, (request, count) in enumerate(zip(plan.requests, plan.counts, strict=True)):
        assert request.table is not None
        blocks = request.table.blocks
        first, last = request.computed, request.computed + count
        found.ids += request.tokens[first:last]
        found.positions += range(first, last)
        found.slots += slots_of(blocks, first, last, block_size)
        found.rows += [row] * count
        found.starts.append(found.starts[-1] + count)
        found.lengths.append(last)
        found.tables.append(blocks[: -(-last // block_size)])
    return found


def pack(plan: Plan, block_size: int, device: torch.device) -> Batch:
    found = lists_of(plan, block_size)
    tables, longest = found.padded_tables()
    ids, positions, ends, slots, rows, blocks, starts, lengths = to_device(
        [found.ids, found.positions, found.ends, found.slots, found.rows, tables, found.starts, found.lengths], device
    )
    spans = torch.tensor(list(zip(plan.counts, found.lengths, strict=True)))
    return Batch(
        ids[None], positions[None], ends, slots, rows, blocks.view(-1, longest), starts, lengths, spans
    )  # fmt: skip


def slots_of(blocks: list[int], first: int, last: int, block_size: int) -> list[int]:
    """Where the cache holds the tokens first…last-1 of a sequence."""
    if last - first < 2 * block_size:  # numpy takes longer over few numbers
        return [blocks[p // block_size] * block_size + p % block_size for p in range(first, last)]
    places = np.arange(first, last)
    return (np.array(blocks)[places // block_size] * block_size + places % block_size).tolist()


def to_device(lists: list[list[int]], device: torch.device) -> list[Tensor]:
    """One copy, which nobody waits for. Each list begins at a multiple of 16 bytes: kernels are compiled for that,
    and once more for what is not so."""
    flat: list[int] = []
    begins = []
    for values in lists:
        begins.append(len(flat))
        flat += values
        flat += [0] * (len(values) % 2)
    whole = on_host(flat, device).to(device, non_blocking=True)
    return [whole[begin : begin + len(values)] for begin, values in zip(begins, lists, strict=True)]


def on_host(values: list[int], device: torch.device) -> Tensor:
    """In memory that the device copies from by itself."""
    found = torch.from_numpy(np.array(values, dtype=np.int64))  # four times as fast as torch.tensor
    return found.pin_memory() if device.type == "cuda" else found
