"""How the tokens of a step come to the host: into memory that the device writes, and an event that says when."""

from __future__ import annotations

import torch
from torch import Tensor


def host(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host that the device copies from and to by itself."""
    return torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")


class Arrival:
    """The tokens of a step on the host, and when they are there."""

    def __init__(self, tokens: Tensor, device: torch.device) -> None:
        self.tokens = tokens  # [rows]
        timed = device.type == "cuda"
        self.begin = torch.cuda.Event(enable_timing=True) if timed else None
        self.done = torch.cuda.Event(enable_timing=True) if timed else None

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    def seconds(self) -> float:
        """How long the step took on the device; 0 on a CPU, where the launch itself takes that time."""
        return 0.0 if self.begin is None or self.done is None else self.begin.elapsed_time(self.done) / 1e3
