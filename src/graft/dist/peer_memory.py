"""Memory of GPUs that all ranks of a machine read and write: torch's symmetric memory."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import torch
import torch.distributed._symmetric_memory as symmetric_memory

from graft.base.errors import UsageError
from graft.ops.peers import PeerMemory, region_size

if TYPE_CHECKING:
    from graft.dist.group import TorchGroup

SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def share_memory(group: TorchGroup, width: int, device: torch.device) -> PeerMemory:
    """Called by all ranks at once, before a CUDA graph is captured."""
    said = [place.split() for place in group.said(f"{socket.gethostname()} {device_id(device)}")]
    if len({host for host, _ in said}) > 1:
        raise UsageError(
            "a kernel that reads the memory of other ranks was asked for by name, but these are on several machines"
            f" ({', '.join(sorted({host for host, _ in said}))}); leave it out of `kernels`"
        )
    if len({gpu for _, gpu in said}) < group.world:
        os.environ[SHARED_GPU] = "1"  # device='cuda:0' puts all ranks on one GPU, which torch takes for a mistake
    try:
        own = symmetric_memory.empty(region_size(width, group.world), dtype=torch.uint8, device=device).zero_()
        handle = symmetric_memory.rendezvous(own, group.data.group_name)
        addresses = [handle.get_buffer(rank, own.shape, own.dtype).data_ptr() for rank in range(group.world)]
    except RuntimeError as error:
        raise UsageError(
            "a kernel that reads the memory of other ranks was asked for by name, but these GPUs cannot share any"
            f" ({str(error).splitlines()[0][:120]}); leave it out of `kernels`"
        ) from error
    torch.cuda.synchronize(device)
    group.said("zeros")  # nobody writes a flag before all regions are zeros
    return PeerMemory.of(group.rank, width, own, addresses, handle)


def device_id(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
