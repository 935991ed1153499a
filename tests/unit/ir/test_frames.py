"""Stack traces of nodes, of which only the frames of `forward` are looked at, are those that torch writes."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.fx import proxy

from graft.base.errors import CaptureError
from graft.ir import trace
from graft.ir.program.frames import forward_frames
from graft.ir.trace import export_graph


class Inner(nn.Module):
    def forward(self, x):
        return torch.sin(x) + 1


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return torch.cond(x.sum() > 0, self.inner, self.other, (x,)) * self.inner(x)

    def other(self, x):
        return torch.cos(x)


def traces(module):
    gm = export_graph(module, (torch.ones(3, 4),))
    parts = [part for part in gm.modules() if isinstance(part, torch.fx.GraphModule)]
    found = [(node.name, node.meta.get("stack_trace") or "") for part in parts for node in part.graph.nodes]
    return [(name, re.sub(r"<eval_with_key>\.\d+", "", told)) for name, told in found]  # torch counts its graphs


def test_every_node_has_the_trace_that_torch_gives_it(monkeypatch):
    found = traces(Outer())
    monkeypatch.setattr(trace, "forward_frames", nullcontext)
    assert found == traces(Outer())
    sine = next(told for name, told in found if name.startswith("sin"))
    assert sine.count("in forward") == 2 and "torch.sin(x) + 1" in sine.splitlines()[-1]


def test_other_tracers_keep_their_whole_stack():
    class Whole(torch.fx.Tracer):
        record_stack_traces = True

    with forward_frames():
        found = [node.stack_trace for node in Whole().trace(Inner()).nodes if node.op == "call_function"]
    assert len(found) == 2 and all("in forward" in told and "in create_node" in told for told in found)


def test_torch_is_as_before_after_an_error():
    before = proxy.TracerBase.create_node

    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError(proxy.TracerBase.create_node is not before)

    with pytest.raises(CaptureError, match="ValueError: True"):
        export_graph(Broken(), (torch.ones(2),))
    assert proxy.TracerBase.create_node is before
