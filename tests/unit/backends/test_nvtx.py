"""NVTX ranges: nested by layer, transform and op, and always closed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import graft
from graft.backends import nvtx
from graft.base.errors import UsageError
from graft.cli.app import app


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return x + self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sin()


@pytest.fixture
def ranges(monkeypatch):
    """What nsys would show, indented."""
    shown, depth = [], [0]

    def push(text):
        shown.append("  " * depth[0] + text)
        depth[0] += 1

    def pop():
        depth[0] -= 1
        assert depth[0] >= 0

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", pop)
    monkeypatch.setenv(nvtx.SWITCH, "1")
    yield shown
    assert depth[0] == 0


@pytest.mark.parametrize("backend", ["eager", "cuda_graph"])
def test_ranges_are_nested_by_layer_transform_and_op(ranges, backend):
    module, x = Stack(), torch.randn(2, 8)
    config = {"transforms": {"fuse_add_rms_norm": {"enabled": False}}}
    compiled = graft.compile(module, (x,), backend=backend, config=config)
    with torch.no_grad():
        got = compiled(x)
        ranges.clear()
        torch.testing.assert_close(compiled(x), got)
    names = [line.split(" %")[0] for line in ranges]
    assert names[:4] == ["layer 0", "  fuse_rms_norm", "    graft.rms_norm", "  as captured"]
    assert names.count("layer 1") == 1 and names[-3:] == ["outside the layers", "  as captured", "    aten.sin"]
    assert "(layers.0, test_nvtx.py:" in ranges[2]
    assert nvtx.NOTE in compiled.report.notes


def test_ranges_are_closed_when_a_call_raises(ranges):
    class Looks(Stack):
        def forward(self, x, index, flag):
            return torch.cond(
                flag.any(), lambda t, i: t[i].clone(), lambda t, i: t.cos()[i], (super().forward(x), index)
            )

    x, index, flag = torch.randn(2, 8), torch.tensor([1]), torch.tensor([True])
    compiled = graft.compile(Looks(), (x, index, flag), backend="eager")
    with torch.no_grad():
        for given in (flag, ~flag):
            with pytest.raises(IndexError):
                compiled(x, torch.tensor([5]), given)  # the fixture: nothing is open at the end
    assert any("aten.index" in line for line in ranges)


def test_inductor_says_that_its_code_has_none(ranges):
    compiled = graft.compile(Stack(), (torch.randn(2, 8),), backend="inductor")
    backend = graft.Backend()
    torch.compile(Stack(), backend=backend)(torch.randn(2, 8))
    for report in (compiled.report, *backend.reports):
        assert nvtx.NONE in report.notes and nvtx.NOTE not in report.notes


def test_there_are_none_unless_asked_for(monkeypatch):
    monkeypatch.delenv(nvtx.SWITCH, raising=False)
    compiled = graft.compile(Stack(), (torch.randn(2, 8),))
    assert "push" not in compiled.variants[0].call.code and nvtx.NOTE not in compiled.report.notes


def test_a_torch_without_cuda_is_refused(monkeypatch):
    def missing(text):
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", missing)
    monkeypatch.delenv(nvtx.SWITCH, raising=False)
    with pytest.raises(UsageError, match="NVTX ranges need a torch that was built with CUDA"):
        nvtx.switch_on()
    assert not nvtx.ranges_on()
    told = CliRunner().invoke(app, ["run", "hello", "--model", "tiny-llama", "--nvtx"])
    assert told.exit_code != 0 and "NVTX ranges need" in f"{told.output}{told.exception}"
