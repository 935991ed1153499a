"""Where a rank of an engine runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graft.dist.group import TorchGroup


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs. sharers: ranks that take memory from the same device. threads: of each, on a CPU."""

    group: TorchGroup
    device: str
    sharers: int
    threads: int | None = None

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world(self) -> int:
        return self.group.world


def place_of(device: str, local_rank: int, local_world: int, alone: bool = False) -> tuple[str, str, int]:
    """The device of a rank, what it exchanges with, and how many share the device.

    `cuda` gives each rank a GPU of its own; `cuda:0` puts all on that one, over gloo: for tests of correctness.
    alone: a launcher may have left this rank one GPU to see, its own (srun --gpus-per-task 1).
    """
    from graft.base.errors import UsageError
    from graft.models.places import resolve_device

    found = resolve_device(device)
    if found.type != "cuda":
        return device, "gloo", local_world
    if found.index is not None and device != "auto" and ":" in device:
        return device, "gloo", local_world
    count = torch.cuda.device_count()
    if count == 1 and local_world > 1 and alone:
        return "cuda:0", "nccl", 1
    if count < local_world:
        raise UsageError(
            f"{local_world} ranks need {local_world} GPUs, and this machine has {count}; lower tensor_parallel_size,"
            " start ranks on several machines (torchrun, srun), or put all on one GPU with device='cuda:0', which is"
            " slow"
        )
    return f"cuda:{local_rank}", "nccl", 1
