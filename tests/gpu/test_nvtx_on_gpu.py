"""NVTX ranges with the real NVTX: nested by layer, transform and op, always closed; a replay has none."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import graft
from graft.backends import nvtx
from graft.cli.app import app


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))

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
    """What is handed to NVTX, indented by its depth: without a profiler NVTX itself counts none."""
    shown, open_ranges, push, pop = [], [], torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop

    def begin(text):
        shown.append("  " * len(open_ranges) + text)
        open_ranges.append(text)
        push(text)

    def end():
        open_ranges.pop()
        pop()

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", begin)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", end)
    monkeypatch.setenv(nvtx.SWITCH, "1")
    yield shown
    assert open_ranges == []


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "cuda_graph"])
def test_ranges_are_nested_and_a_replay_has_none(ranges, backend):
    x = torch.randn(2, 64, device="cuda")
    config = {"transforms": {"fuse_add_rms_norm": {"enabled": False}}}
    compiled = graft.compile(Stack().cuda(), (x,), backend=backend, config=config)
    ranges.clear()
    first = compiled(x)  # of a CUDA graph: warm-up and capture
    names = [line.split(" %")[0] for line in ranges]
    assert names[:4] == ["layer 0", "  fuse_rms_norm", "    graft.rms_norm", "  as captured"]
    assert names[-3:] == ["outside the layers", "  as captured", "    aten.sin"]
    assert nvtx.NOTE in compiled.report.notes
    ranges.clear()
    torch.testing.assert_close(compiled(x), first)
    assert bool(ranges) == (backend == "eager")


def test_the_engine_runs_with_ranges(ranges):
    ran = CliRunner().invoke(
        app, ["run", "--token-ids", "1,2,3", "--model", "tiny-llama", "--nvtx", "--max-tokens", "4"]
    )
    assert ran.exit_code == 0, ran.output
    assert any(line.strip() == "layer 1" for line in ranges) and any("paged_attention" in line for line in ranges)
