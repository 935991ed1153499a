"""graft.compile: any module, its signature, its results, its state."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graft
from graft.base.errors import CaptureError, UnknownBackend, UsageError
from marks import short


class Block(nn.Module):
    """Norm, gated MLP, residual; keyword arguments and a dict out."""

    def __init__(self, d=16):
        super().__init__()
        self.w = nn.Parameter(torch.randn(d))
        self.gate, self.up, self.down = nn.Linear(d, 32, False), nn.Linear(d, 32, False), nn.Linear(32, d, False)

    def forward(self, x, *, scale=None):
        h = self.w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
        y = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return {"y": y * scale if scale is not None else y, "norm": h}


@pytest.mark.parametrize("backend", short(["auto", "eager", "inductor"], "eager"))
def test_same_signature_same_results(backend):
    module, x, s = Block().eval(), torch.randn(2, 3, 16), torch.tensor(0.5)
    compiled = graft.compile(module, (x,), {"scale": s}, backend=backend)
    expected = module(x, scale=s)
    got = compiled(x, scale=s)
    assert got.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(got[key], expected[key])
    assert compiled.backend == ("inductor" if backend == "inductor" else "eager")
    counts = {n: len(r.matches) for n, r in compiled.report.transforms.items() if r.matches}
    assert counts == {"fuse_rms_norm": 1, "fuse_swiglu": 1, "merge_gate_up": 1}


@pytest.mark.parametrize("backend", short(["eager", "inductor"], "eager"))
def test_dynamic_shapes(backend):
    module = Block().eval()
    dynamic = {"x": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
    compiled = graft.compile(module, (torch.randn(2, 3, 16),), dynamic_shapes=dynamic, backend=backend)
    for shape in ((2, 3, 16), (5, 7, 16), (1, 9, 16)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x)["y"], module(x)["y"])


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_mutated_buffers_and_inputs_are_kept(backend):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x, cache):
            self.steps.add_(1)
            cache[:, 1].copy_(x)
            return x * self.steps

    module, expected = Counter(), Counter()
    compiled = graft.compile(module, (torch.ones(3), torch.zeros(3, 2)), backend=backend)
    cache, other = torch.zeros(3, 2), torch.zeros(3, 2)
    for step in range(3):
        x = torch.full((3,), float(step + 1))
        assert torch.equal(compiled(x, cache), expected(x, other))
        assert torch.equal(cache, other)


def test_a_caller_s_tensor_is_not_touched_by_a_functional_module():
    module = Block().eval()
    x = torch.randn(2, 3, 16)
    compiled, kept = graft.compile(module, (x,)), x.clone()
    compiled(x)
    assert torch.equal(x, kept)


def test_bad_backend_and_uncapturable_module():
    with pytest.raises(UnknownBackend, match="did you mean 'eager'"):
        graft.compile(Block(), (torch.randn(2, 3, 16),), backend="eagre")

    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match="Branches"):
        graft.compile(Branches(), (torch.randn(3),))


def test_unknown_names_of_the_package_are_errors():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        graft.nothing  # noqa: B018
    assert {"LLM", "compile", "SamplingParams"} <= set(dir(graft))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c(torch.randn(4, 8), 3), "has the shape"),
        (lambda c: c(torch.randn(4, 6).half(), 3), "is torch.float16"),
        (lambda c: c(torch.randn(4, 6), 5), "3 is fixed in the graph"),
        (lambda c: c(torch.randn(4, 6)), "compiled with 2 inputs"),
        (lambda c: c(torch.randn(4, 6), m=3), "keyword arguments"),
        (lambda c: c(1.0, 3), "was a tensor"),
    ],
)
def test_inputs_it_was_not_captured_for_are_refused(call, message):
    class Sliced(nn.Module):
        def forward(self, x, n):
            return x[:, :6] * n

    compiled = graft.compile(Sliced(), (torch.randn(4, 6), 3))
    with pytest.raises(UsageError, match=message):
        call(compiled)
