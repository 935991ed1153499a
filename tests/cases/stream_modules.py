"""Modules with branches, and their graphs with calls on given streams."""

from __future__ import annotations

import torch
from torch import nn

from graft.ir.streams import on_device
from graft.ir.trace import export_graph
from graft.passes.library.streams.emit import apply_schedule
from graft.passes.library.streams.schedule import Schedule, ScheduledCall


class Branches(nn.Module):
    """Two branches from one product, and a counter."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        h = x * 2
        return self.a(h).relu() + self.b(h).relu()


def graph_of(module, *args):
    return export_graph(module, args or (torch.ones(2, 8),))


def placed(module, streams):
    """The module's graph with its calls on the given streams."""
    gm = graph_of(module)
    names = [node.name for node in gm.graph.nodes if on_device(node)]
    slots = tuple(ScheduledCall(name, "", stream, 0.0, 1.0) for name, stream in zip(names, streams, strict=True))
    apply_schedule(gm, Schedule(slots, 1.0, 1.0, 1.0), "test")
    return gm
