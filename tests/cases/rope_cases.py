"""What the tests of fuse_rope share."""

from __future__ import annotations

import torch
from torch import nn

from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, is_op
from graft.ir.trace import export_graph
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry, load_all

load_all()
B, H, S, D, R = 2, 3, 5, 16, 8
DTYPES = [torch.float32, torch.bfloat16]


class Module(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def fuse(function, args, dynamic_shapes=None):
    known = TransformRegistry.names()
    config = load_config({"transforms": {n: {"enabled": n == "fuse_rope"} for n in known}})
    gm = export_graph(Module(function), args, dynamic_shapes=dynamic_shapes)
    before = graph_text(gm.graph)
    record = run_pipeline(gm, config).transforms["fuse_rope"]
    return gm, record, before


def ropes(gm):
    return [node for node in calls(gm.graph) if is_op(node, torch.ops.graft.rope.default)]


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape))).to(dtype)


def angles(*shape, dtype=torch.float32):
    angle = randn(*shape, seed=7)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def llama(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def every_two(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def unbound_parts(x, cos, sin):
    x1, x2 = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1).flatten(-2)


def meta_heads_first(x, freqs):
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * freqs
    return torch.view_as_real(turned).flatten(-2).type_as(x)
