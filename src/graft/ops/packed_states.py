"""What sequences of a packed batch [1, T] keep from step to step: a state a sequence, each in a slot of its own.

A sequence whose tokens are all fed in this step is new: what its slot held before is somebody else's and counts as
zeros. So a slot needs no clearing when it is given on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from graft.ops.cases import randn


@dataclass(frozen=True)
class StateShape:
    """What a recurrence keeps of a sequence, in a tensor of [slots, *sizes]."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize


class PackedPart(NamedTuple):
    """A sequence with tokens first…last-1 of the batch."""

    row: int
    first: int
    last: int
    new: bool


def parts_of(lens_cpu: Tensor) -> Iterator[PackedPart]:
    """The sequences that have tokens in this step. lens_cpu: [n, 2], query_lens and seq_lens, on the host."""
    first = 0
    for row, (count, length) in enumerate(lens_cpu.tolist()):
        if count:
            yield PackedPart(row, first, first + count, length == count)
        first += count


def held_states(state: Tensor, slots: Tensor, cu_seqlens: Tensor, seq_lens: Tensor) -> Tensor:
    """[n, …]: the state of each sequence before this step, zeros for new ones, whatever lies in their slots."""
    known = seq_lens > cu_seqlens.diff()
    return torch.where(known.view(-1, *[1] * (state.dim() - 1)), state.index_select(0, slots), 0)


def make_layout(new: tuple[int, ...], old: tuple[int, ...], device: str) -> dict[str, Tensor]:
    """For cases: sequence i has seen old[i] tokens and brings new[i] more; slots are scattered among more than are
    needed."""
    counts, before = torch.tensor(new), torch.tensor(old)
    order = torch.arange(2 * len(new) + 1).flip(0)
    cu_seqlens = torch.tensor([0, *counts.cumsum(0).tolist()])
    on_device = {
        "state_slots": order[::2][: len(new)].contiguous(),
        "token_to_seq": torch.repeat_interleave(torch.arange(len(new)), counts),
        "cu_seqlens": cu_seqlens,
        "seq_lens": counts + before,
    }
    return {name: t.to(device) for name, t in on_device.items()} | {
        "lens_cpu": torch.stack((counts, counts + before), dim=1)
    }


def make_state(
    shape: tuple[int, ...], count: int, device: str, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """For cases: twice as many slots as sequences and one, all of which hold something."""
    return randn((2 * count + 1, *shape), device, dtype, generator)
