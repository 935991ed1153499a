"""Nodes have their value, and not what torch writes beside it; other threads' traces have both."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graft.ir.program.node_values import values_alone
from graft.ir.trace import export_graph, trace_function


def written(gm):
    """The kinds of what is known of the results of calls."""
    known = {key for node in gm.graph.nodes if node.op == "call_function" for key in node.meta}
    return known & {"val", "tensor_meta"}


def traced():
    return written(make_fx(torch.relu)(torch.zeros(2)))


def test_a_graph_has_values_alone():
    assert written(export_graph(torch.nn.ReLU(), (torch.zeros(2, 3),))) == {"val"}
    assert written(trace_function(torch.relu, [torch.zeros(2)])) == {"val"}


def test_what_others_trace_is_as_torch_writes_it():
    with values_alone(), ThreadPoolExecutor(1) as other:
        with values_alone():
            assert traced() == {"val"}
        assert other.submit(traced).result() == {"val", "tensor_meta"} and traced() == {"val"}
    assert traced() == {"val", "tensor_meta"}
