"""torch.cond, while_loop, scan and map on a GPU: fused inside on each route, and a CUDA graph says why not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import graft
from graft.base.errors import CaptureRefused


def norm(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(8), requires_grad=False)


class Cond(Weighted):
    def forward(self, x):
        return norm(torch.cond(x.sum() > 0, lambda x: norm(x, self.w), lambda x: x * 2, (x,)), self.w)


class Loop(Weighted):
    def forward(self, x):
        start = torch.zeros((), dtype=torch.int64, device=x.device)
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, norm(x * 2, self.w)), (start, x))


class Scan(Weighted):
    def forward(self, x):
        return scan(lambda c, x: (c * x, norm(c * x, self.w)), torch.ones(8, device=x.device), x, dim=0)


class Map(Weighted):
    def forward(self, x):
        return map_over(lambda x: norm(x, self.w), x.unsqueeze(1))


MATCHES = {Cond: 2, Loop: 1, Scan: 1, Map: 1}


def made(program, device):
    torch.manual_seed(0)
    module, x = program().to(device), torch.randn(4, 8, device=device)
    return module, x, [(value, module(value)) for value in (x, -x.abs(), x.abs() * 3)]


@torch.no_grad()
@pytest.mark.parametrize("program", MATCHES)
def test_eager_binds_kernels_inside(device, program, tmp_path):
    module, x, known = made(program, device)
    compiled = graft.compile(module, (x,), backend="eager")
    assert len(compiled.report.transforms["fuse_rms_norm"].matches) == MATCHES[program]
    assert compiled.report.kernels["graft::rms_norm"].ran[0].sites == MATCHES[program]
    compiled.save(tmp_path / "saved")
    for run in (compiled, graft.load(tmp_path / "saved")):
        for value, expected in known:
            torch.testing.assert_close(run(value), expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(*(expected if torch.is_tensor(expected) else expected[-1] for _, expected in known[:2]))


@torch.no_grad()
@pytest.mark.parametrize("program", MATCHES)
@pytest.mark.parametrize("route", ["inductor", "graft"])
def test_inductor_and_torch_compile_fuse_inside(device, program, route, compiled_anew):
    module, x, known = made(program, device)
    backend = graft.Backend()
    run = (
        graft.compile(module, (x,), backend=route) if route == "inductor" else torch.compile(module, backend=backend)
    )
    for value, expected in known:
        torch.testing.assert_close(run(value), expected, rtol=1e-4, atol=1e-5)
    (report,) = [run.report] if route == "inductor" else backend.reports
    assert len(report.transforms["fuse_rms_norm"].matches) == MATCHES[program]


@pytest.mark.parametrize("program", MATCHES)
def test_a_cuda_graph_says_why_not(device, program):
    module, x, _ = made(program, device)
    with pytest.raises(CaptureRefused, match="is the higher-order op"):
        graft.compile(module, (x,), backend="cuda_graph")
