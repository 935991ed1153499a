"""How the benchmarks of whole steps take the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def step_seconds(call: Callable[..., Any], args: tuple[torch.Tensor, ...], steps: int) -> float:
    """One step, averaged over `steps` in a row; the host may run ahead, as in a decode loop."""
    if args[0].is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        call(*args)
    if args[0].is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps
