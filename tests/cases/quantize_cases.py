"""Configurations that quantize, small modules, and what their reports say."""

from __future__ import annotations

import torch
from torch import nn

import graft
from graft.ir.nodes import calls, is_op
from graft.passes.config import load_config

FORMATS = ("int8", "int4", "fp8")
FUSED = torch.ops.graft.fused_linear.default


def on(kind: str = "int8", **options):
    return {"transforms": {"quantize_linear": {"enabled": True, "format": kind, **options}}, "verify": "matches"}


def only(kind: str):
    """quantize_linear and no other transform."""
    off = {name: {"enabled": False} for name in load_config().transforms}
    return {"transforms": off | on(kind)["transforms"], "verify": "matches"}


def compiled(module: nn.Module, *inputs, kind: str = "int8", **options):
    """The record of quantize_linear, and the compiled module."""
    with torch.no_grad():
        made = graft.compile(module.eval(), inputs, backend="eager", config=on(kind, **options))
    return made.report.transforms["quantize_linear"], made


def fused_calls(made) -> list:
    return [node for node in calls(made.graph_module.graph) if is_op(node, FUSED)]


def reasons(record) -> str:
    return "; ".join(miss.reason for miss in record.near_misses)


class MLP(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 41, bias=bias), nn.Linear(41, 24, bias=bias)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
