"""Memory that the ranks of one machine read of each other, for kernels that exchange rows without a library.

    region of a rank   parts [2, LANES, width bytes]   rows of its own, by lane, for the others to read
                       flags [world, LANES] int64      how many rows each rank has put into that lane

A lane is a program of a kernel. For every row it counts its epoch up, puts the row of this rank into the slot of the
epoch's parity, writes the epoch into the flags of all ranks, and waits until all have written theirs. Two slots are
enough: who sees epoch e + 1 of another rank knows that it has read everything of epoch e. All ranks launch the same
kernels over as many rows in the same order, so that their lanes count alike; the counts are on the device, where a
CUDA graph that is replayed goes on from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graft.ops import ranks

LANES = 64  # programs; all must run at once, each on a multiprocessor of its own at worst (132 on an H200)
FOREVER = 1 << 62  # an epoch that no lane comes to
ALIGNED = 16  # bytes that a thread moves at once


@dataclass(frozen=True, eq=False)
class PeerMemory:
    """own: the region of this rank. bases: where those of all begin, as this process sees them. epochs: of this
    rank's lanes. side, forever: what lets waiting kernels go. keep: what the regions of others lie in."""

    rank: int
    width: int
    own: Tensor
    bases: Tensor
    epochs: Tensor
    side: torch.cuda.Stream | None
    forever: Tensor
    keep: Any

    @property
    def world(self) -> int:
        return len(self.bases)

    @staticmethod
    def of(rank: int, width: int, own: Tensor, addresses: list[int], keep: Any = None) -> PeerMemory:
        device, on_gpu = own.device, own.device.type == "cuda"
        bases = torch.tensor(addresses, dtype=torch.int64, device=device)
        epochs = torch.zeros(LANES, dtype=torch.int64, device=device)
        forever = torch.full((len(addresses) * LANES,), FOREVER, dtype=torch.int64, pin_memory=on_gpu)
        return PeerMemory(
            rank, width, own, bases, epochs, torch.cuda.Stream(device) if on_gpu else None, forever, keep
        )

    def let_go(self) -> None:
        """Another rank is gone: kernels that wait for it end, with numbers that nobody may read. By a copy on a
        stream of its own: to load a kernel now could mean to wait for those that run."""
        with torch.cuda.stream(self.side):
            self.own[flags_at(self.width) :].view(torch.int64).copy_(self.forever, non_blocking=True)


def flags_at(width: int) -> int:
    """Bytes from the beginning of a region."""
    return 2 * LANES * width


def region_size(width: int, world: int) -> int:
    return flags_at(width) + 8 * LANES * world


def row_width(x: Tensor) -> int:
    """Bytes of a row, filled up."""
    return -(-x.shape[-1] * x.element_size() // ALIGNED) * ALIGNED


def peer_memory(x: Tensor, world: int) -> PeerMemory:
    """For rows like those of x; made by all ranks at the first call. One rank by itself has its own region alone."""
    width = row_width(x)
    if world > 1:
        return ranks.current_group(world).peer_memory(width, x)
    region = torch.zeros(region_size(width, 1), dtype=torch.uint8, device=x.device)
    return PeerMemory.of(0, width, region, [region.data_ptr()])


def peer_problem(world: int) -> str | None:
    """Why there is no such memory, or None."""
    if world == 1:
        return "one rank has nobody to exchange with"
    if ranks.in_thread():
        return "the ranks are threads of one process"
    return None if ranks.PROCESS else "this process is no rank of a group"
