"""Checks that the program makes of its data run when it is compiled, before the writes that follow them."""

from __future__ import annotations

import pytest
import torch

import graft
from graft.base.errors import CaptureRefused
from graft.ir.checks import is_check
from graft.ir.trace import export_graph
from marks import short

aten = torch.ops.aten
X = torch.ones(4)


class Checked(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("cache", torch.zeros(4))

    def forward(self, x, *numbers):
        return self.function(self, x, *numbers)


def below_ten(self, x, n):
    k = n.item()
    torch._check(k < 10)
    self.cache.add_(x)
    return self.cache * k


def is_five(self, x, n):
    k = n.item()
    torch._check(k == 5)
    self.cache.add_(x)
    return self.cache * k


def both_five(self, x, n, m):
    j, k = n.item(), m.item()
    torch._check(j == 5)
    torch._check(k == 5)
    self.cache.add_(x)
    return self.cache * j + k


def equal(self, x, n, m):
    j, k = n.item(), m.item()
    torch._check(j == k)
    self.cache.add_(x)
    return self.cache * j + k


def as_many(self, x, n, m):
    chosen = n.nonzero() + m.nonzero()
    self.cache.add_(x)
    return self.cache.sum() + chosen


def positive(self, x, n):
    torch._assert_async((n > 0).all(), "positive")
    self.cache.add_(x)
    return self.cache * n


def copied_back(self, x, n):
    new = self.cache.index_copy(0, torch.tensor([1]), x[:1])
    k = n.item()
    torch._check(k < 10)
    self.cache.copy_(new)
    return x * k


def number(value):
    return torch.tensor(value)


PROGRAMS = {  # program, numbers that pass, numbers that do not
    "a bound": (below_ten, (number(3),), (number(20),)),
    "a constant": (is_five, (number(5),), (number(6),)),
    "two constants, the second wrong": (both_five, (number(5), number(5)), (number(5), number(6))),
    "two equal numbers": (equal, (number(3), number(3)), (number(3), number(4))),
    "equal counts": (as_many, (X.clone(), X.clone()), (X.clone(), number([1.0, 1.0, 0.0, 0.0]))),
    "a tensor": (positive, (number(3),), (number(-3),)),
    "copied back after the check": (copied_back, (number(3),), (number(20),)),
}


@pytest.mark.parametrize("backend", short(["eager", "inductor"], "eager"))
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_failing_check_raises_before_anything_is_written(name, backend):
    function, good, bad = PROGRAMS[name]
    eager, module = Checked(function), Checked(function)
    compiled = graft.compile(module, (X, *good), backend=backend)
    for _ in range(2):
        assert torch.equal(compiled(X, *good), eager(X, *good))
        assert torch.equal(module.cache, eager.cache)
    with pytest.raises(RuntimeError):
        eager(X, *bad)
    with pytest.raises(RuntimeError):
        compiled(X, *bad)
    assert torch.equal(module.cache, eager.cache)
    assert torch.equal(compiled(X, *good), eager(X, *good))


def test_a_number_read_back_is_refused_for_a_capture_and_an_asynchronous_check_is_not():
    with pytest.raises(CaptureRefused, match="item"):
        graft.compile(Checked(below_ten), (X, number(3)), backend="cuda_graph")
    module = Checked(positive)
    compiled = graft.compile(module, (X, number(3)), backend="cuda_graph")
    assert torch.equal(compiled(X, number(3)), X * 3)
    with pytest.raises(RuntimeError, match="positive"):
        compiled(X, number(-3))
    assert torch.equal(module.cache, X)


def test_what_capture_has_proven_leaves_no_check():
    def sized(self, x):
        torch._check(x.shape[0] >= 3)
        return x.to(torch.float64) * x.shape[0]

    sizes = ({0: torch.export.Dim("n", min=3, max=64)},)
    gm = export_graph(Checked(sized), (X,), dynamic_shapes=sizes)
    assert not [node for node in gm.graph.nodes if is_check(node)]


def test_checks_of_two_numbers_that_are_said_to_be_equal_read_both():
    gm = export_graph(Checked(both_five), (X, number(5), number(5)))
    checks = [node for node in gm.graph.nodes if is_check(node)]
    read = {source for check in checks for compared in check.all_input_nodes for source in compared.all_input_nodes}
    assert {node.args[0].name for node in read} == {"numbers_0", "numbers_1"}
    assert max(checks) < next(node for node in gm.graph.nodes if node.target is aten.add_.Tensor)


def test_an_update_that_is_copied_back_after_a_check_stays_a_copy():
    compiled = graft.compile(Checked(copied_back), (X, number(3)), backend="eager")
    (miss,) = (miss for record in compiled.report.transforms.values() for miss in record.near_misses)
    assert "checks a value between" in miss.reason
