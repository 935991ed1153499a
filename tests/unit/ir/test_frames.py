"""Stack traces of nodes, of which only the frames of `forward` are looked at, are those that torch writes; in
branches they are the lines of the program and not those of generated code."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
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
    return [(node.name, node.meta.get("stack_trace") or "") for part in parts for node in part.graph.nodes]


def test_every_node_has_the_trace_that_torch_gives_it(monkeypatch):
    found = traces(Outer())
    monkeypatch.setattr(trace, "forward_frames", nullcontext)
    generated = [(name, "<eval_with_key>" in told) for name, told in traces(Outer())]
    assert [one for one, (_, made) in zip(found, generated, strict=True) if not made] == [
        one for one, (_, made) in zip(traces(Outer()), generated, strict=True) if not made
    ]
    assert sum(made for _, made in generated) > 3, "of branches torch tells the lines that it made"
    sine = next(told for name, told in found if name.startswith("sin"))
    assert sine.count("in forward") == 2 and "torch.sin(x) + 1" in sine.splitlines()[-1]


def test_nodes_of_branches_and_bodies_have_the_lines_of_the_program():
    class Loop(nn.Module):
        def forward(self, x):
            def body(i, x):
                y = x * 2
                return i + 1, y.sin()

            return while_loop(lambda i, x: i < 3, body, (torch.tensor(0), x))

    lines = {"mul": "y = x * 2", "sin": "return i + 1, y.sin()", "while_loop": "return while_loop(lambda"}
    for module, wanted in ((Loop(), lines), (Outer(), {"cos": "return torch.cos(x)", "cond": "return torch.cond("})):
        found = traces(module)
        assert not any("<eval_with_key>" in told or "gradient_flags" in told for _, told in found)
        for op, line in wanted.items():
            told = next(told for name, told in found if name.rpartition("graph_0_")[2].rstrip("_0123456789") == op)
            assert told.splitlines()[-1].strip().startswith(line), told


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
