"""How Triton kernels are launched.

Programmatic dependent launch lets a kernel start while the one before it still runs: it loads what cannot depend on
that one (weights), then waits. Every kernel launched so must wait before it reads an activation or stores anything.
"""

from __future__ import annotations

import os
from functools import cache

import torch

# The layout of a batch (slots, block tables, lengths) may be read ahead of the wait: it is written by copies, or by
# graft::advance_rows, which an ordinary kernel follows (the embedding of the tokens that it feeds). That one starts
# when all before it has ended, and what is launched early starts behind it.
LAYOUT_SETTLED = True

RING = 1 << 16  # counters of a device: calls take them in turn, so that two that run at once have their own


def pdl_supported(device: torch.device) -> bool:
    """Whether kernels on this device may be launched before the one ahead of them has ended."""
    return pdl_problem(device) is None


@cache
def pdl_problem(device: torch.device) -> str | None:
    """Why launches on this device are plain ones, or None."""
    if device.type != "cuda":
        return f"{device} is no CUDA device"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Triton's interpreter runs the kernels"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        return f"compute capability {major}.{minor} has no programmatic dependent launch; 9.0 and above do"
    return None


@cache
def zeros(device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """Counters, and where the next call takes its own."""
    return torch.zeros(RING, dtype=torch.int32, device=device), [0]


def counters(count: int, device: torch.device) -> torch.Tensor:
    """`count` zeros, for programs of one kernel to count each other; the last one sets its counter back to 0."""
    if count > RING // 2:
        return torch.zeros(count, dtype=torch.int32, device=device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing() and not zeros.cache_info().currsize:
        return torch.zeros(count, dtype=torch.int32, device=device)  # part of the graph, and zero at every replay
    ring, place = zeros(device)
    first = place[0] if place[0] + count <= RING else 0
    place[0] = first + count
    return ring[first : first + count]
