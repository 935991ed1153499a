"""How large the cache may be."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import torch

from graft.base.errors import OutOfMemory, UsageError

GIB = 1 << 30
UNITS = {"": 1, "B": 1} | {
    unit: 1 << shift
    for shift, units in ((10, "K KB KIB"), (20, "M MB MIB"), (30, "G GB GIB"), (40, "T TB TIB"))
    for unit in units.split()
}
CPU_SHARE, CPU_MOST = 0.5, 4 * GIB  # of what is free: other programs live there too
CUDA_MARGIN, CUDA_LEAST_MARGIN = 0.1, GIB  # left free for activations and the library's workspaces


@dataclass(frozen=True)
class CacheSize:
    """How many blocks, and in words why."""

    blocks: int
    bytes: int
    reason: str


def cache_size(
    block_bytes: int, most_blocks: int, device: torch.device, asked: int | str | None = None,
    addressable: int | None = None, *, sharers: int = 1, beside: int = 0,
) -> CacheSize:  # fmt: skip
    """As many blocks as the memory allows, and no more than the engine can ever use at once. addressable: blocks
    beyond these are for those who ask for them. sharers: processes that each take as much of the device's memory as
    this one. beside: bytes of the same memory that something else has taken."""
    free = free_memory(device) // sharers
    if asked is not None:
        limit, reason = parse_size(asked), "as asked for"
        if limit > free:
            needed, there = size_text(limit), size_text(free)
            raise OutOfMemory(f"a key-value cache of {needed} was asked for, but {device} has {there} free")
    elif device.type == "cuda":
        limit = free - max(int(free * CUDA_MARGIN), CUDA_LEAST_MARGIN)
        reason = f"{size_text(free)} are free on {device}; a margin of {size_text(free - limit)} is kept"
        if addressable is not None and addressable * block_bytes < limit:
            limit = addressable * block_bytes
            reason = f"what kernels address with 32 bits, of {size_text(free)} that are free on {device}"
    else:
        limit = min(int(free * CPU_SHARE), CPU_MOST // sharers)
        reason = f"{size_text(free)} are free; on a CPU half of it, and at most {size_text(CPU_MOST)}, is taken"
    if beside:
        limit, reason = limit - beside, f"{reason}, less {size_text(beside)} for recurrent states"
    if limit >= most_blocks * block_bytes:
        blocks, reason = most_blocks, "all that the engine can use at once"
    else:
        blocks = limit // block_bytes
    if blocks < 1:
        raise OutOfMemory(
            f"no room for a key-value cache: one block takes {size_text(block_bytes)}, and"
            f" {size_text(max(limit, 0))} may be used ({reason}). Free memory, use a smaller dtype, or set"
            " kv_cache_memory"
        )
    return CacheSize(blocks, blocks * block_bytes, reason)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch has a class for a GPU and a sentence for a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    told = str(error)  # "not enough memory" or, on Linux, "can't allocate memory"
    return isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in told or "out of memory" in told)


def parse_size(size: int | str, name: str = "kv_cache_memory") -> int:
    """2147483648, "2GiB", "2G", "0.5 GB" or "512MiB"; units are powers of 1,024."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if found is None or found[2].upper() not in UNITS or isinstance(size, bool):
        raise UsageError(f"{name} is a size like 2GiB or 512MiB or a number of bytes, not {size!r}")
    amount = int(Decimal(found[1]) * UNITS[found[2].upper()])
    if amount < 1:
        raise UsageError(f"{name} must be more than 0, but is {size!r}")
    return amount


def size_text(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"


def free_memory(device: torch.device) -> int:
    """Bytes that can be taken now: of the GPU with what torch holds but does not use, or of the machine's (or the
    container's) memory."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    free = machine_memory(Path("/proc/meminfo"))
    limit = container_memory(Path("/sys/fs/cgroup"))
    return free if limit is None else min(free, limit)


def machine_memory(meminfo: Path) -> int:
    if meminfo.exists():
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def container_memory(folder: Path) -> int | None:
    """What a container's limit leaves, or None where there is no limit."""
    most, used, detail = (folder / f"memory.{name}" for name in ("max", "current", "stat"))
    if not most.exists() or not used.exists() or (text := most.read_text().strip()) == "max":
        return None
    found = re.search(r"^inactive_file (\d+)", detail.read_text(), re.MULTILINE) if detail.exists() else None
    pages = int(found[1]) if found else 0  # of files that were read; the kernel takes them back when memory is needed
    return max(int(text) - int(used.read_text()) + pages, 0)
