"""What the tests of fuse_elementwise share."""

from __future__ import annotations

import torch
from torch import nn

from graft.graph.nodes import calls, is_op
from graft.graph.text import graph_text
from graft.graph.trace import export_graph
from graft.ops.elementwise.reference import elementwise
from graft.ops.elementwise.triton import elementwise_triton
from graft.transforms.config import load_config
from graft.transforms.pipeline import run_pipeline
from graft.transforms.registry import TransformRegistry, load_all

load_all()
ON = {"transforms": {"fuse_elementwise": {"enabled": True}}}
DYNAMIC = torch.export.Dim.DYNAMIC


class Wrap(nn.Module):
    """A function as a module; `state` become buffers that it gets first."""

    def __init__(self, function, *state):
        super().__init__()
        self.function = function
        self.names = [f"state{i}" for i in range(len(state))]
        for name, tensor in zip(self.names, state, strict=True):
            self.register_buffer(name, tensor.clone())

    def forward(self, *args):
        return self.function(*(getattr(self, name) for name in self.names), *args)


def fused(module, args, dynamic_shapes=None):
    """The graph after fuse_elementwise alone, its record, and the text before."""
    config = load_config({"transforms": {n: {"enabled": n == "fuse_elementwise"} for n in TransformRegistry.names()}})
    module = module if isinstance(module, nn.Module) else Wrap(module)
    gm = export_graph(module, args, dynamic_shapes=dynamic_shapes)
    before = graph_text(gm.graph)
    record = run_pipeline(gm, config).transforms["fuse_elementwise"]
    return gm, record, before


def programs(gm):
    return [node.args[1] for node in calls(gm.graph) if is_op(node, torch.ops.graft.elementwise.default)]


def sizes(record):
    return sorted(len(match.replaced) for match in record.matches)


def run_with(gm, kernel, *args):
    """The graph with that kernel for every program."""
    for node in calls(gm.graph):
        if is_op(node, torch.ops.graft.elementwise.default):
            node.target = kernel
    gm.recompile()
    with torch.no_grad():
        return gm(*args)


def check_same(function, args, dynamic_shapes=None):
    """Fused, the module gives the same bits with the reference, and Triton's kernel the same numbers."""
    expected = function(*args)
    gm, record, _ = fused(function, args, dynamic_shapes)
    assert record.status == "applied", record.reason
    for got, wanted in zip(flat(run_with(gm, elementwise, *args)), flat(expected), strict=True):
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)
    gm, _, _ = fused(function, args, dynamic_shapes)
    for got, wanted in zip(flat(run_with(gm, elementwise_triton, *args)), flat(expected), strict=True):
        bound = 1e-5 if wanted.dtype in (torch.float32, torch.bool, torch.int64) else 0.02
        torch.testing.assert_close(got, wanted, rtol=bound, atol=bound, equal_nan=True)
    return gm, record


def flat(value):
    return list(value) if isinstance(value, (tuple, list)) else [value]


X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def gelu_new(x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


def check_order(gm):
    gm.graph.lint()
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    assert all(order[a] < order[node] for node in gm.graph.nodes for a in node.all_input_nodes)
