"""Gradients of a compiled module on a GPU: those of the module, refused, or dropped with a note."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graft
from graft.base.errors import GradientsRefused, UsageError


class Block(nn.Module):
    """Norm, merged gate and up, a rounding whose backward differs from its forward, dropout."""

    def __init__(self, p=0.0, width=64):
        super().__init__()
        self.w, self.p = nn.Parameter(torch.randn(width)), p
        self.gate, self.up = nn.Linear(width, 128, False), nn.Linear(width, 128, False)
        self.down = nn.Linear(128, width, False)

    def forward(self, x):
        h = self.w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
        y = self.down(F.silu(self.gate(h)) * self.up(h))
        y = y + (y.round() - y).detach() * 0.1
        return {"y": x + F.dropout(y, self.p, training=True), "top": y.argmax(-1)}


def made(device, p=0.0):
    torch.manual_seed(0)
    return Block(p).to(device), torch.randn(2, 3, 64, device=device), torch.randn(2, 3, 64, device=device)


def gradients(run, module, x, weight):
    for parameter in module.parameters():
        parameter.grad = None
    leaf = x.clone().requires_grad_()
    torch.manual_seed(1)
    result = run(leaf * 2)
    (result["y"] * weight).sum().backward()
    return result, {"x": leaf.grad, **{name: p.grad for name, p in module.named_parameters()}}


@pytest.mark.parametrize(("backend", "p"), [("eager", 0.0), ("eager", 0.5), ("inductor", 0.0)])
def test_honoured_gradients_are_those_of_the_module(device, backend, p):
    module, x, weight = made(device, p)
    expected, wanted = gradients(module, module, x, weight)
    compiled = graft.compile(module, (x,), grad="honour", backend=backend)
    assert len(compiled.report.transforms["fuse_rms_norm"].matches) == 1 and compiled.backend == backend
    for _ in range(2):
        got, found = gradients(compiled, module, x, weight)
        torch.testing.assert_close(got["y"], expected["y"], rtol=1e-4, atol=1e-4)
        assert got["y"].requires_grad and not got["top"].requires_grad
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    with pytest.raises(AssertionError):  # the tolerance tells a wrong gradient from a right one
        torch.testing.assert_close({**found, "x": found["x"] * 1.01}, wanted, rtol=1e-3, atol=1e-4)
    if p:  # and another mask from this one
        torch.manual_seed(2)
        assert not torch.equal(compiled(x * 2)["y"], got["y"])


def test_training_goes_on_with_the_trained_weights(device):
    left, x, target = made(device)
    right = copy.deepcopy(left)
    compiled = graft.compile(right, (x,), grad="honour")
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (left, right)]
    for _ in range(3):
        for run, optimizer in zip((left, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            F.mse_loss(run(x)["y"], target).backward()
            optimizer.step()
    torch.testing.assert_close(dict(right.named_parameters()), dict(left.named_parameters()), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", ["eager", "cuda_graph", "inductor"])
def test_refused_or_dropped_unless_asked_for(device, backend):
    module, x, _ = made(device)
    compiled = graft.compile(module, (x,), backend=backend)
    with pytest.raises(GradientsRefused, match=r"x requires gradients.*grad='honour'"):
        compiled(x.clone().requires_grad_())
    assert any("results carry none, though w, gate.weight" in note for note in compiled.report.notes)
    dropping = graft.compile(module.requires_grad_(False), (x,), backend=backend, grad="drop")
    result = dropping(x.clone().requires_grad_())["y"]
    assert not result.requires_grad and "gradients of the input x are dropped, as asked" in dropping.report.notes
    torch.testing.assert_close(result, module(x)["y"], rtol=1e-4, atol=1e-4)


def test_a_cuda_graph_honours_none(device):
    module, x, _ = made(device)
    with pytest.raises(UsageError, match="grad='honour' is for the backends eager and inductor"):
        graft.compile(module, (x,), grad="honour", backend="cuda_graph")
