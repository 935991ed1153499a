"""`self.buffer = …` in a forward becomes a write into the buffer, in submodules too."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import graft
from graft.base.errors import CaptureError
from graft.ir.canonical.normal_form import canonicalize
from graft.ir.effects import is_mutating
from graft.ir.program.assignments import assignments_as_writes


class Swap(nn.Module):
    """Swaps its buffers; returns a view of one before and one after."""

    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.arange(6.0))
        self.register_buffer("b", -torch.arange(6.0))

    def forward(self, x):
        old = self.a[1:]
        self.a, self.b = self.b + x, self.a
        return old, self.a[:2], self.b


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Swap()

    def forward(self, x, *, scale=1):
        return [value * scale for value in self.inner(x)]


def exported(module):
    with torch.no_grad():
        return torch.export.export(module, (torch.ones(6),), strict=False).module()


@pytest.mark.parametrize("kind", [Swap, Outer])
def test_assigned_buffers_are_written(kind):
    module, expected = kind(), kind()
    with assignments_as_writes(module):
        graph = exported(module)
    for _ in range(3):
        for got, wanted in zip(graph(torch.ones(6)), expected(torch.ones(6)), strict=True):
            assert torch.equal(got, wanted)
        for got, wanted in zip(graph.buffers(), expected.buffers(), strict=True):
            assert torch.equal(got, wanted)


def test_torch_export_alone_loses_them():
    """When this fails torch has mended it, and ir/program/assignments.py may go."""
    graph, expected = exported(Outer()), Outer()
    graph(torch.ones(6)), expected(torch.ones(6))
    assert not all(torch.equal(a, b) for a, b in zip(graph.buffers(), expected.buffers(), strict=True))


def test_the_module_is_left_as_it_was():
    module = Swap()
    first = module.a
    with assignments_as_writes(module):
        exported(module)
    assert "forward" not in vars(module) and module.a is first and torch.equal(first, torch.arange(6.0))
    module.forward = lambda x: x
    own = module.forward
    with assignments_as_writes(module):
        pass
    assert module.forward is own


def test_a_copy_onto_itself_is_dropped():
    module = Swap()
    with assignments_as_writes(module):
        graph = exported(module)
    before = sum(is_mutating(node) for node in graph.graph.nodes)
    canonicalize(graph)
    assert (before, sum(is_mutating(node) for node in graph.graph.nodes)) == (4, 2)


class Wrong(Swap):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        self.a = self.value(self, x)
        return x + 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda self, x: torch.cat((self.a, x)), r"assigns torch.float32 \(12,\) on cpu to the buffer 0.a"),
        (lambda self, x: x.to(torch.bfloat16), "assigns torch.bfloat16"),
        (lambda self, x: None, "takes away the buffer 0.a"),
    ],
)
def test_what_is_no_write_is_refused(value, message):
    module = nn.Sequential(Wrong(value))
    with assignments_as_writes(module), pytest.raises(CaptureError, match=message):
        exported(module)


def test_a_tied_buffer_is_refused():
    module = Wrong(lambda self, x: x * 2)
    module.register_buffer("c", module.a)
    with assignments_as_writes(module), pytest.raises(CaptureError, match=r"shares its memory .* \(c\)"):
        exported(module)


class ReadsFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.now = self.w.data

    def forward(self, x):
        y = x + self.now
        self.now = self.w * 2
        return y


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("nest", [lambda layer: layer, nn.Sequential])
def test_a_weight_that_is_computed_anew_is_parted_from_the_parameter(mode, nest):
    torch.manual_seed(0)
    layer = torch.nn.utils.spectral_norm(nn.Linear(4, 4))
    module = nest(layer).train(mode)
    original, x = layer.weight_orig.detach().clone(), torch.randn(2, 4)
    assert layer.weight.data_ptr() == layer.weight_orig.data_ptr()
    eager = copy.deepcopy(module)
    compiled = graft.compile(module, (x,), backend="eager")
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(compiled(x), eager(x))
        right = next(part for part in eager.modules() if isinstance(part, nn.Linear))
    assert torch.equal(layer.weight_orig, original) and torch.equal(layer.weight, right.weight)
    assert not torch.equal(layer.weight, original)


def test_a_weight_that_is_read_before_is_refused():
    module = ReadsFirst()
    with pytest.raises(CaptureError, match=r"assigns now, which shares its memory with w: eager would part"):
        graft.compile(module, (torch.ones(3),), backend="eager")
    assert module.now.data_ptr() == module.w.data_ptr()
