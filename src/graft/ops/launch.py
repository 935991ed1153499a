"""How Triton kernels are launched.

Programmatic dependent launch lets a kernel start while the one before it still runs: it loads what cannot depend on
that one (weights), then waits. Every kernel launched so must wait before it reads an activation or stores anything.
"""

from __future__ import annotations

import os
from functools import cache

import torch

# True: the layout of a batch (slots, block tables, lengths) is written before the first kernel of a step is launched,
# by a copy or at the end of the step before, and may be read ahead of the wait. A kernel of the step that writes it
# forbids this: of kernels launched early, several may be waiting at once.
LAYOUT_SETTLED = False


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
