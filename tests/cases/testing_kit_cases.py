"""What tests of the testing kit share: a module with a fusion and an input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


class Gated(nn.Module):
    def __init__(self, keep=False, layers=1):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.keep, self.layers = keep, layers

    def forward(self, x):
        for _ in range(self.layers):
            a = F.silu(self.gate(x))
            x = a * self.up(x)
        return (x, a) if self.keep else x
