"""A rank of graft::all_reduce_add_norm's kernel in Triton's interpreter, over a file that all ranks map.

python peer_worker.py RANK WORLD FOLDER [early | late]     early: nobody waits; late: begins when rank 0 is through
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import graft.ops.all_reduce_add_norm.triton as kernels
from graft.ops.peers import PeerMemory, region_size, row_width

WIDTH, EPS = 40, 1e-5
# one, more than lanes, fewer again: the lanes of all ranks count alike, and both slots of the first come twice
ROWS = (1, 66, 2)
LOOKS = 2**22  # minutes of the interpreter: a test that fails ends


def inputs(
    rank: int, call: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The part of a rank, the residual and the weight of a call; the latter two are equal on all."""
    own = torch.Generator().manual_seed(100 * call + rank)
    shared = torch.Generator().manual_seed(100 * call + 99)
    rows = ROWS[call], WIDTH
    residual, weight = torch.randn(rows, generator=shared), torch.randn(WIDTH, generator=shared)
    return torch.randn(rows, generator=own), residual, weight


def mapped(folder: Path, rank: int, world: int) -> PeerMemory:
    """The regions of all ranks, one behind the other in a file of zeros."""
    x = torch.empty(1, WIDTH)
    size = region_size(row_width(x), world)
    whole = torch.from_file(str(folder / "regions"), shared=True, size=size * world, dtype=torch.uint8)
    regions = whole.view(world, size)
    return PeerMemory.of(rank, row_width(x), regions[rank], [one.data_ptr() for one in regions], whole)


def main(rank: int, world: int, folder: Path, how: str) -> None:
    if how == "early":
        kernels.wait_for_all = lambda *_: None
    if how == "late":
        while not (folder / "0.pt").exists():
            time.sleep(0.02)
    memory, found = mapped(folder, rank, world), []
    for call in range(len(ROWS)):
        found.append(kernels.run_over(memory, *inputs(rank, call), EPS, 0.0, False, False, most=LOOKS))
    torch.save((found, memory.epochs), folder / f"{rank}.partial")
    (folder / f"{rank}.partial").rename(folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *(sys.argv[4:] or [""]))
