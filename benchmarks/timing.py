"""How the benchmarks of whole steps and of single calls take the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graft.base.timers import clocked, synchronize


def step_seconds(call: Callable[..., Any], args: tuple[torch.Tensor, ...], steps: int) -> float:
    """One step, averaged over `steps` in a row; the host may run ahead, as in a decode loop."""

    def work() -> None:
        for _ in range(steps):
            call(*args)
        synchronize(args[0].device)

    synchronize(args[0].device)
    return clocked(work, 1, warm_up=0)[0] / steps


def seconds(call: Callable[[], Any], device: str, least: float) -> float:
    """One run of `call`, averaged over as many as fill `least` seconds."""
    place, runs = torch.device(device), 1

    def work() -> None:
        for _ in range(runs):
            call()
        synchronize(place)

    while True:
        synchronize(place)
        (took,) = clocked(work, 1, warm_up=0)
        if took >= least:
            return took / runs
        runs *= 2
