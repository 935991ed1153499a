"""A block with a site for each of three fusions, right and wrong replacements, and a transform made for a test."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graft.ir.edit import second_module
from graft.ir.trace import export_graph
from graft.passes.base import Stage, TransformConfig
from graft.passes.config import PipelineConfig
from graft.passes.library import fuse_swiglu
from graft.passes.library.norms import fuse_rms_norm
from graft.passes.patterns import PatternTransform, Rewrite
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry

aten, ops = torch.ops.aten, torch.ops.graft


class Block(nn.Module):
    """A norm, a gated projection and a rotary turn: one place for each of three fusions."""

    def __init__(self, d=8, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d).to(dtype))
        self.gate, self.up = nn.Linear(d, d, False, dtype=dtype), nn.Linear(d, d, False, dtype=dtype)

    def forward(self, x, cos, sin):
        h = x.to(torch.float32)
        h = self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
        h = F.silu(self.gate(h)) * self.up(h)
        half = h.shape[-1] // 2
        return h * cos + torch.cat((-h[..., half:], h[..., :half]), -1) * sin


def block_graph(dtype=torch.float32, device="cpu"):
    """A copy of its own, of what is captured once."""
    return second_module(captured_block(dtype, device))


@cache
def captured_block(dtype, device):
    with torch.device(device):
        module, x = Block(dtype=dtype), torch.randn(2, 3, 5, 8).to(dtype)
        angles = torch.randn(2, 1, 5, 8).to(dtype)
    dynamic = {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC}
    return export_graph(module, (x, angles.cos(), angles.sin()), dynamic_shapes=(dynamic,) * 3)


@pytest.fixture(name="planted")
def planted_transform():
    """Runs one transform made for a test, with numeric checks or without."""
    names = []

    def run(gm, make, verify="matches", on_error="raise"):
        cls = type("Planted", (make,), {"__doc__": "For a test."})
        TransformRegistry.register("planted")(cls)
        names.append("planted")
        settings = {"planted": TransformConfig(Stage.MATCH, on_error=on_error)}
        return run_pipeline(gm, PipelineConfig(settings, verify=verify)).transforms["planted"]

    yield run
    for name in names:
        TransformRegistry._known.pop(name, None)


def pattern_transform(pattern, replacement, shapes):
    return type("Made", (PatternTransform,), {"rewrites": lambda self: [Rewrite(pattern, replacement, shapes)]})


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return ops.rope(x, cos, sin)


def double_eps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ops.rms_norm(x, weight, 2 * eps)


def no_eps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ops.rms_norm(x, weight, 0.0)


def offset(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ops.rms_norm(x, weight, eps, 1.0, True)


NORM, GATED = fuse_rms_norm.SHAPES, fuse_swiglu.SHAPES
ROPE = {"x": "b h s d", "cos": "b 1 s d", "sin": "b 1 s d"}
WRONG = {
    "another eps": (fuse_rms_norm.rms_norm, double_eps, NORM),
    "no eps": (fuse_rms_norm.rms_norm, no_eps, NORM),
    "an offset": (fuse_rms_norm.rms_norm, offset, NORM),
    "gate and up swapped": (fuse_swiglu.plain, lambda gate, up: ops.swiglu(up, gate), GATED),
    "another activation": (fuse_swiglu.plain, lambda gate, up: ops.swiglu(gate, up, "gelu"), GATED),
    "the other direction": (rotated, lambda x, cos, sin: ops.rope(x, cos, -sin), ROPE),
    "cos and sin swapped": (rotated, lambda x, cos, sin: ops.rope(x, sin, cos), ROPE),
}
RIGHT = {
    "norm": (fuse_rms_norm.rms_norm, fuse_rms_norm.fused, NORM),
    "gated": (fuse_swiglu.plain, fuse_swiglu.fused, GATED),
    "rope": (rotated, rope, ROPE),
}
