"""A step's tokens, packed into one row, and where they lie in the cache."""

from __future__ import annotations

from dataclasses import dataclass

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


def pack(plan: Plan, block_size: int, device: torch.device) -> Batch:
    """The next `counts[i]` tokens of requests[i], i = 0…n-1."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    starts, lengths, tables = [0], [], []
    for row, (request, count) in enumerate(zip(plan.requests, plan.counts, strict=True)):
        assert request.table is not None
        blocks = request.table.blocks
        first, last = request.computed, request.computed + count
        ids += request.tokens[first:last]
        positions += range(first, last)
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(first, last)]
        rows += [row] * count
        starts.append(starts[-1] + count)
        lengths.append(last)
        tables.append(blocks[: -(-last // block_size)])
    longest = max(map(len, tables))
    # padding that is read and masked must not be another's: a NaN there would not be hidden
    padded = [blocks + blocks[:1] * (longest - len(blocks)) for blocks in tables]

    def tensor(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Batch(
        tensor([ids]), tensor([positions]), tensor([s - 1 for s in starts[1:]]), tensor(slots), tensor(rows),
        tensor(padded), tensor(starts), tensor(lengths), torch.tensor(list(zip(plan.counts, lengths, strict=True))),
    )  # fmt: skip
