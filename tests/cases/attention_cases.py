"""What the tests of fuse_attention share: inputs, small spellings, the comparison."""

from __future__ import annotations

import torch
from torch import nn

from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, is_op, options_of
from graft.ir.trace import export_graph
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry, load_all

load_all()
B, H, KV, S, D = 2, 4, 2, 7, 8
SCALE = D**-0.5
INF = -torch.inf
OP = torch.ops.graft.attention.default
TOLERANCE = {torch.float32: (1e-5, 2e-6), torch.bfloat16: (2e-2, 2e-2)}


class Fn(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, *args):
        return self.fn(*args)


def only(*names):
    return load_config({"transforms": {n: {"enabled": n in names} for n in TransformRegistry.names()}})


def fuse(module, args, *names, dynamic_shapes=None):
    """The transformed graph, the record of fuse_attention and the graph's text before it."""
    gm = export_graph(module, args, dynamic_shapes=dynamic_shapes)
    before = graph_text(gm.graph)
    report = run_pipeline(gm, only("fuse_attention", *names))
    return gm, report.transforms["fuse_attention"], before


def options(gm):
    """The arguments of the one attention in a graph."""
    (node,) = (n for n in calls(gm.graph) if is_op(n, OP))
    return options_of(node)


def close(got, expected, dtype=torch.float32):
    """Raises where two results differ by more than rounding."""
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)


def tensors(dtype=torch.float32, kv=H, s=S, t=S, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, s, D), (B, kv, t, D), (B, kv, t, D))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def repeat_kv(x, groups):
    b, kv, t, d = x.shape
    return x[:, :, None].expand(b, kv, groups, t, d).reshape(b, kv * groups, t, d)


def causal(s, t=None):
    return torch.ones(s, t or s, dtype=torch.bool).tril()


def attend(scores, v):
    return torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v


def lowest(x):
    return torch.finfo(x.dtype).min
