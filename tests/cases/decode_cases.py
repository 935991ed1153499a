"""Small decoder blocks and the configuration that runs the decode fusions on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule

from graft.ir.io.text import target_text
from graft.ir.nodes import calls
from graft.ir.trace import export_graph
from graft.passes.base import Context
from graft.passes.config import PipelineConfig, load_config
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry, load_all
from graft.passes.report import Report

load_all()
# every transform that can be told its devices
DECODE = TransformRegistry.with_key("devices")
NAMED = ("fuse_rms_norm", "fuse_swiglu", "fuse_add_rms_norm", "fuse_rope")  # what models spell out
D = 16


def forced(**more: Any) -> dict[str, Any]:
    """A configuration mapping in which the decode fusions run on a CPU too."""
    return {"transforms": {name: {"devices": ["cpu"]} for name in DECODE}, **more}


def only(*names: str, verify: str = "matches", options: dict[str, Any] | None = None) -> PipelineConfig:
    settings = {name: {"enabled": name in names} for name in TransformRegistry.names()}
    for name in DECODE:
        settings[name] |= {"devices": ["cpu"]} if name in names else {}
        settings[name] |= (options or {}).get(name, {})
    return load_config({"verify": verify, "transforms": settings})


def transformed(
    module: nn.Module, args: tuple[Any, ...], *names: str, dynamic_shapes: Any = None, options: Any = None
) -> tuple[GraphModule, Report]:
    """The graph after the named transforms, each match checked, as the engine would run them."""
    return run_transforms(export_graph(module, args, dynamic_shapes=dynamic_shapes), *names, options=options)


def run_transforms(gm: GraphModule, *names: str, options: Any = None) -> tuple[GraphModule, Report]:
    return gm, run_pipeline(gm, only(*names, options=options), Context(route="decoder", context_length=64))


def targets(gm: GraphModule) -> list[str]:
    return [target_text(node.target) for node in calls(gm.graph)]


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def x_of(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Block(nn.Module):
    """Two residual steps of a decoder: a mixer that stands for attention, and a gated MLP. `bias` of the products."""

    def __init__(self, dtype: torch.dtype = torch.float32, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        make = lambda n, k: nn.Linear(k, n, bias=bias).to(dtype)  # noqa: E731
        self.qkv, self.o, self.gate_up, self.down = make(D, D), make(D, D), make(4 * D, D), make(D, 2 * D)
        self.g1, self.g2 = (nn.Parameter(torch.rand(D).to(dtype) + 0.5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.o(self.qkv(norm(x, self.g1)).sin())
        gate, up = self.gate_up(norm(x, self.g2)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)
