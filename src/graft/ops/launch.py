"""How Triton kernels are launched.

Programmatic dependent launch lets a kernel start while the one before it still runs: it loads what cannot depend on
that one (weights), then waits. Every kernel launched so must wait before it reads an activation or stores anything.

The layout of a batch (slot_mapping, block_tables, seq_lens) and what older steps left in the cache may be read ahead
of the wait: the layout is written by copies, or by graft::advance_rows, which an ordinary kernel follows (the
embedding of the tokens that it feeds). That one starts when all before it has ended, and what is launched early
starts behind it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

FLOAT8_CAPABILITY = (8, 9)
HOPPER = (9, 0)
RING = 1 << 16  # counters of a stream; calls take them in turn
ALIGNED = 4  # counters, 16 bytes: Triton compiles a kernel once more for a pointer that is not aligned to them


@dataclass
class Ring:
    """Counters, and where the next call takes its own."""

    zeros: torch.Tensor
    cursor: int = 0


@cache
def device_name(device: torch.device) -> str:
    """As measurements are kept by it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors; few where the interpreter runs the kernels."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def dense_rows(x: Tensor) -> Tensor:
    """[..., d] as [n, d], whose values lie side by side. Of a permuted batch of one (channels that became the last
    dim) `reshape` makes a view in which they do not."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def pdl_supported(device: torch.device) -> bool:
    """Whether kernels on this device may be launched before the one ahead of them has ended."""
    return pdl_problem(device) is None


def starts_early(device: torch.device, *weights: Tensor | None) -> bool:
    """The same for a kernel that reads these ahead of its wait: parameters. What the graph computes may be what the
    kernel ahead of it still writes; an ordinary launch starts when that has ended."""
    return pdl_supported(device) and all(one is None or isinstance(one, torch.nn.Parameter) for one in weights)


@cache
def pdl_problem(device: torch.device) -> str | None:
    """Why launches on this device are plain ones, or None."""
    if device.type != "cuda":
        return f"{device} is no CUDA device"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Triton's interpreter runs the kernels"
    if torch.version.hip is not None:
        return "it is CUDA's"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        return f"compute capability {major}.{minor} has no programmatic dependent launch; 9.0 and above do"
    return None


@cache
def float8_missing(device: torch.device) -> str | None:
    """Why Triton has no float8 (e4m3) numbers on this device, or None."""
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return "float8 (e4m3) is converted by instructions of CUDA devices"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < FLOAT8_CAPABILITY:
        return f"compute capability {major}.{minor} has no float8 (e4m3) numbers; 8.9 and above have"
    return None


@cache
def gluon_missing(device: torch.device) -> str | None:
    """Why kernels in Gluon, which name Hopper's instructions, do not run on this device, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device} is no CUDA device"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Triton's interpreter does not run Gluon"
    capability = torch.cuda.get_device_capability(device)
    if capability != HOPPER:
        return f"it is written for compute capability 9.0, and here it is {capability[0]}.{capability[1]}"
    try:
        from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait  # noqa: F401
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: F401
    except ImportError as error:
        return f"this Triton has no Gluon for Hopper: {error}"
    return None


RINGS: dict[tuple[torch.device, int], Ring] = {}


def ring(device: torch.device) -> Ring:
    """That of the current stream: kernels of one stream use a counter one after the other."""
    key = (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    if key not in RINGS:
        RINGS[key] = Ring(torch.zeros(RING, dtype=torch.int32, device=device))
    return RINGS[key]


def counters(count: int, device: torch.device) -> torch.Tensor:
    """`count` zeros, for programs of one kernel to count each other; the last one sets its counter back to 0."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    known = not capturing or (device, torch.cuda.current_stream(device).cuda_stream) in RINGS
    if count > RING // 2 or not known:  # in a capture they are part of the graph, and zero at every replay
        return torch.zeros(count, dtype=torch.int32, device=device)
    own = ring(device)
    first = own.cursor if own.cursor + count <= RING else 0
    own.cursor = first + -(-count // ALIGNED) * ALIGNED
    return own.zeros[first : first + count]


def launch_failures() -> tuple[type[Exception], ...]:
    """What a kernel that cannot be compiled or launched ends with; errors of CUDA and of torch are RuntimeErrors."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return (RuntimeError, CompilationError, OutOfResources, PTXASError)


def counted_on_device(tensor: torch.Tensor, lens_cpu: torch.Tensor) -> bool:
    """Whether a step is replayed with other sequences than the host has now: one on fixed memory begins with rows
    that bring no token (engine/decode/packed.py), and a capture would keep what it took from the host."""
    return capturing(tensor) or not int(lens_cpu[0, 0])


def capturing(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is captured right now: what it takes from the CPU stays as it is."""
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
