"""The fixed memory of decode steps: a row a request, shared by the captures of all batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graft.engine.core import Request
from graft.engine.decode.arrival import Arrival, host
from graft.engine.decode.choose import LARGEST_K, SamplingRows
from graft.ops.advance_rows.reference import NOTHING
from graft.ops.layout import Batch, one_token_each

# The lines of `state` [lines, rows], eight bytes each; the last three are float64.
TOKENS, SEQ_LENS, LIVE, ENTRIES, BLOCKS, STATE_SLOTS, LINES_FILLED, TOP_K, TEMPERATURE, MIN_P, TOP_P = range(11)
LINES = 11
RING = 2  # steps on the way at once


class StepBuffers(Arrival):
    """What one step brings to the device and back. It is used again when that step has ended."""

    def __init__(self, tokens: Tensor, device: torch.device) -> None:
        super().__init__(tokens, device)  # its line of the ring
        rows = tokens.shape[0]
        self.commands = host((3, rows), torch.int64, device)  # entries, blocks, slots of states
        self.uniform = host((rows,), torch.float64, device)
        self.command_array, self.uniform_array = self.commands.numpy(), self.uniform.numpy()  # the same memory


@dataclass(frozen=True)
class Buffers:
    """`padding` is the block of the cache that rows without a request write to; the block manager has it not. So is
    `nobody` the slot of recurrent states."""

    block_size: int
    padding: int
    nobody: int
    state: Tensor  # [LINES, rows] int64
    uniform: Tensor  # [rows] float64
    fed: Tensor  # [3, rows]: input ids, positions, slots
    block_tables: Tensor  # [rows, width]
    sent: Tensor  # [rows * width]: tables as they come from the host, without gaps
    counting: Tensor  # [rows + 1]: 0, 1, 2, …
    lens_cpu: Tensor  # [rows, 2]: one new token a row
    host_state: Tensor
    host_tables: Tensor  # [rows * width]
    delivered: Tensor  # [RING, rows], on the host: tokens of the steps on the way, written by the device
    ring: tuple[StepBuffers, ...]
    filled: torch.cuda.Event | None

    @staticmethod
    def make(rows: int, width: int, block_size: int, padding: int, device: torch.device, nobody: int = 0) -> Buffers:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        delivered = host((RING, rows), torch.int64, device)
        buffers = Buffers(
            block_size, padding, nobody, zeros(LINES, rows), zeros(rows, dtype=torch.float64), zeros(3, rows),
            zeros(rows, width), zeros(rows * width), torch.arange(rows + 1, device=device),
            torch.ones(rows, 2, dtype=torch.int64), host((LINES, rows), torch.int64, device),
            host((rows * width,), torch.int64, device), delivered,
            tuple(StepBuffers(line, device) for line in delivered),
            torch.cuda.Event() if device.type == "cuda" else None,
        )  # fmt: skip
        buffers.fill([], rows)
        return buffers

    @property
    def longest(self) -> int:
        """Tokens that a row has room for."""
        return self.block_tables.shape[1] * self.block_size

    @property
    def tokens(self) -> Tensor:
        return self.state[TOKENS]  # [rows]

    @property
    def lines_filled(self) -> Tensor:
        return self.state[LINES_FILLED, :1]  # [1]: steps launched so far

    @property
    def commands(self) -> Tensor:
        return self.state[ENTRIES : STATE_SLOTS + 1]  # [3, rows]

    def state_slots(self, count: int) -> Tensor:
        """[count]: where the rows have the states of recurrent layers."""
        return self.state[STATE_SLOTS, :count]

    def advance(self, count: int) -> tuple[Tensor, Sequence[Any]]:
        """Where the inputs of a step of `count` rows go, and what graft::advance_rows makes them of."""
        lines = [self.state[line, :count] for line in (TOKENS, SEQ_LENS, LIVE, ENTRIES, BLOCKS)]
        return self.fed[:, :count], (*lines, self.block_tables[:count], self.padding, self.block_size)

    def settings(self, count: int) -> SamplingRows:
        lines = (self.state[line].view(torch.float64) for line in (TEMPERATURE, MIN_P, TOP_P))
        each = (*lines, self.state[TOP_K], self.uniform)
        return SamplingRows(*(line[:count, None] for line in each))

    def batch(self, count: int, width: int) -> Batch:
        """The graph's inputs for a step of `count` rows, a token each, with tables of `width` blocks."""
        return one_token_each(
            self.fed[:, :count],
            self.counting[: count + 1],
            self.block_tables[:count, :width],
            self.state[SEQ_LENS, :count],
            self.lens_cpu[:count],
        )

    def fill(self, requests: Sequence[Request], count: int, lines_filled: int = 0) -> None:
        """Rows 0…n-1 are these requests, about to feed their last token; those up to `count` are padding.
        lines_filled: of the ring, whose line the next step writes."""
        if self.filled is not None:
            self.filled.synchronize()  # the last filling may still be copied from the memory that is written now
        state = self.host_state.numpy()
        numbers = state.view(np.float64)
        state[:], state[SEQ_LENS], state[ENTRIES], state[LINES_FILLED] = 0, 1, NOTHING, lines_filled
        state[STATE_SLOTS] = self.nobody
        longest = max((len(r.table.blocks) for r in requests if r.table is not None), default=1)
        tables = self.host_tables.numpy()[: count * longest].reshape(count, longest)
        tables[:] = self.padding
        for row, request in enumerate(requests):
            assert request.table is not None
            blocks, params = request.table.blocks, request.params
            # padding that is read and masked must not be another's: a NaN there would not be hidden
            tables[row, : len(blocks)], tables[row, len(blocks) :] = blocks, blocks[0]
            state[[TOKENS, SEQ_LENS, LIVE, TOP_K], row] = (
                request.tokens[-1],  # or what the device knows better (Feed)
                request.fed,
                1,
                min(params.top_k, LARGEST_K),
            )
            if request.state_slot is not None:
                state[STATE_SLOTS, row] = request.state_slot
            numbers[[TEMPERATURE, MIN_P, TOP_P], row] = params.temperature, params.min_p, params.top_p
        self.state.copy_(self.host_state, non_blocking=True)
        self.sent[: tables.size].copy_(self.host_tables[: tables.size], non_blocking=True)
        if self.filled is not None:
            self.filled.record()
        sent = self.sent[: tables.size].view(count, longest)
        self.block_tables[:count] = sent[:, :1]
        self.block_tables[:count, :longest] = sent
