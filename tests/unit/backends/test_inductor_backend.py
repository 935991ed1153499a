"""What the Inductor backend asks of a graph and of each call before Inductor sees them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torch.export import Dim

import graft
from graft.backends.inductor import has_symbols, told_failures, with_right_artifacts
from graft.base.errors import GraftError, GraphRefused
from graft.ir.trace import export_graph


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b", torch.ones(4))

    def forward(self, x, n):
        self.b.add_(x.sum())
        return x * n


@pytest.mark.parametrize(
    ("shapes", "expected"), [(None, False), (({0: Dim.DYNAMIC}, None), True), ((None, Dim.DYNAMIC), True)]
)
def test_sizes_and_numbers_that_vary_are_symbols(shapes, expected):
    graph = export_graph(Scale(), (torch.ones(4), 3), dynamic_shapes=shapes).graph
    assert has_symbols(graph) is expected


def test_inputs_that_share_memory_take_nothing_from_the_cache():
    module = Scale()
    gm = export_graph(module, (torch.ones(4), 3))
    call = with_right_artifacts(lambda *args: functorch_config.enable_autograd_cache, gm)
    x = torch.ones(8)
    usual = functorch_config.enable_autograd_cache
    assert call(x[:4], x.clone()) is usual
    assert call(x[:4], {"more": [x[4:]]}) is False
    assert call(module.b[1:]) is False
    assert functorch_config.enable_autograd_cache is usual


def test_a_graph_that_writes_nothing_is_called_directly():
    gm = export_graph(nn.ReLU(), (torch.ones(4),))
    assert with_right_artifacts(print, gm) is print


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        ("expected size 10==10, stride 1==7 at dim=1", GraphRefused, "backend='eager'"),
        ("a check of the program's own", AssertionError, "a check of the program's own"),
    ],
)
def test_layouts_that_inductor_did_not_expect_are_told(text, kind, told):
    def compiled(x):
        raise AssertionError(text)

    with pytest.raises(kind, match=told):
        told_failures(compiled)(torch.ones(2))
    assert told_failures(torch.sin)(torch.zeros(2)).tolist() == [0, 0]


class OfGraft(GraftError):
    pass


@pytest.mark.parametrize(
    ("inner", "kind", "told"),
    [
        (
            ValueError("no rule for it"),
            GraphRefused,
            "cannot compile this program: ValueError: no rule for it; backend",
        ),
        (OfGraft("said already"), BackendCompilerFailed, "said already"),
    ],
)
def test_what_inductor_cannot_compile_is_an_error_with_a_way_out(inner, kind, told):
    def compiled(x):
        raise BackendCompilerFailed(print, inner, None)

    with pytest.raises(kind, match=told):
        told_failures(compiled)(torch.ones(2))


def test_an_operator_that_takes_no_open_sizes_is_an_error_with_a_way_out():
    def resized(x, like, z):
        return x.neg().resize_as_(like) + 1, z * 2

    args = torch.ones(2, 3), torch.ones(3, 2), torch.ones(5, 4)
    open_sizes = {"x": None, "like": None, "z": {0: Dim.DYNAMIC}}
    compiled = graft.compile(resized, args, backend="inductor", dynamic_shapes=open_sizes)
    with pytest.raises(
        GraphRefused, match=r"cannot compile this program: Dynamo failed .* backend='eager' runs operators"
    ):
        compiled(*args)
    eager = graft.compile(resized, args, backend="eager", dynamic_shapes=open_sizes)
    assert all(map(torch.equal, eager(*args), resized(*args)))
