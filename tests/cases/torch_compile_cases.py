"""What the tests of torch.compile with graft as the backend share."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graft

pytestmark = pytest.mark.usefixtures("fresh_compiler")  # of the testing kit; taken over by the files that import this


class Block(nn.Module):
    """A norm, a gated MLP, and a norm after the residual add."""

    def __init__(self, d=8):
        super().__init__()
        self.first = nn.Parameter(torch.rand(d) + 0.5)
        self.second = nn.Parameter(torch.rand(d) + 0.5)
        self.gate, self.up = nn.Linear(d, 2 * d, bias=False), nn.Linear(d, 2 * d, bias=False)
        self.down = nn.Linear(2 * d, d, bias=False)

    def norm(self, x, weight):
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    def forward(self, x):
        h = self.norm(x, self.first)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return self.norm(x, self.second)


FUSED = {"fuse_rms_norm": 2, "fuse_swiglu": 1, "fuse_add_rms_norm": 1}


def eager_backend(**settings):
    """The transformed graph itself, without Inductor: tests of graphs need no C++ compiler."""
    return graft.Backend(inductor=False, **settings)


def counts(report):
    return {name: len(record.matches) for name, record in report.transforms.items() if record.matches}


def run(function, *args, backend=None, dynamic=None):
    backend = backend or eager_backend()
    with torch.no_grad():
        return torch.compile(function, backend=backend, dynamic=dynamic)(*args), backend
