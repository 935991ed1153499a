"""Small modules with state, for the tests of saved modules; they can be imported in another process too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """A cache in bfloat16, a scale table in int8 that is written too, a counter that is not saved by state_dict."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 8, 16, dtype=torch.bfloat16))
        self.register_buffer("levels", torch.zeros(8, dtype=torch.int8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x, at):
        self.cache.index_copy_(1, at, x[:2].mean(1, keepdim=True).to(torch.bfloat16))
        self.levels.index_copy_(0, at, torch.ones(1, dtype=torch.int8))
        self.steps.add_(1)
        return x + self.cache.float().sum(1).sum(0) * self.steps


class Decoder(nn.Module):
    """Norm, gated MLP, a cache; dynamic batch and length; keyword arguments; a dict of results."""

    def __init__(self, d=16):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d))
        self.gate, self.up, self.down = nn.Linear(d, 32, False), nn.Linear(d, 32, False), nn.Linear(32, d, False)
        self.attn = Attention()
        self.register_buffer("table", torch.randn(d))

    def forward(self, x, at, *, scale, extras):
        h = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)) + self.table
        y = x + self.down(F.silu(self.gate(h)) * self.up(h))
        y = self.attn(y, at)
        return {"y": y * scale, "rest": (y.reshape(y.shape[0] * y.shape[1], -1)[1:], extras["bias"] + 1)}


def decoder_call(batch=2, length=3, step=0, seed=0):
    g = torch.Generator().manual_seed(seed + step)
    x = torch.randn(batch, length, 16, generator=g)
    kwargs = {"scale": torch.tensor(0.5 + step), "extras": {"bias": torch.ones(2)}}
    return (x, torch.tensor([step])), kwargs


def decoder_shapes():
    dim = torch.export.Dim
    return {"x": {0: dim("b", min=2, max=64), 1: dim.DYNAMIC}, "at": None, "scale": None, "extras": {"bias": None}}


LOAD = """
import sys, torch, graft
module = graft.load(sys.argv[1])
calls = torch.load(sys.argv[2])
outputs = [module(*args, **kwargs) for args, kwargs in calls]
aliases = [(alias.output, alias.input, alias.kind) for alias in module.aliases]
state = {name: t.clone() for name, t in module.graph_module.named_buffers()}
module.reset()
reset = {name: t.clone() for name, t in module.graph_module.named_buffers()}
torch.save({"outputs": outputs, "report": module.report.to_json(), "aliases": aliases, "backend": module.backend,
            "state": state, "reset": reset}, sys.argv[3])
"""
