"""Results in memory that the caller brings (`out=`), on every backend of a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

import graft
from graft.base.errors import OutRefused, SharedMemoryError

BACKENDS = ["eager", "cuda_graph", "inductor"]
SIZES = {"x": {0: Dim("batch", max=64)}, "cache": {}, "pos": None}


class Step(nn.Module):
    """A counter, a cache of the caller's, a dict of results, one of them a view of the cache."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("w", torch.randn(8, 8))

    def forward(self, x, cache, pos):
        self.calls.add_(1)
        cache.index_copy_(1, pos, x[:1, None])
        y = x @ self.w
        return {"y": y, "more": (torch.cat([y, y]), cache[:, :2])}


def made(device, backend):
    torch.manual_seed(0)
    module = Step().to(device)
    given = torch.randn(3, 8, device=device), torch.zeros(1, 16, 8, device=device), torch.tensor([1], device=device)
    return module, given, graft.compile(module, given, dynamic_shapes=SIZES, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_written_into_out(device, backend):
    module, (x, cache, pos), compiled = made(device, backend)
    assert compiled.backend == backend
    calls = 0
    for rows in (3, 5):
        out = {"y": torch.empty(rows, 8, device=device), "more": (torch.empty(2 * rows, 8, device=device), None)}
        for _ in range(3):  # a replay into the same memory
            x = torch.randn(rows, 8, device=device)
            wanted = compiled(x, cache, pos)
            got = compiled(x, cache, pos, out=out)
            calls += 2
            assert got["y"] is out["y"] and got["more"][0] is out["more"][0]
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
            assert got["more"][1].data_ptr() == cache.data_ptr()
        other = torch.empty(rows, 8, device=device)  # other memory: the first is left alone
        before = out["y"].clone()
        assert compiled(x * 2, cache, pos, out={"y": other, "more": (None, None)})["y"] is other
        calls += 1
        torch.testing.assert_close(other, (x * 2) @ module.w, rtol=1e-3, atol=1e-3)
        assert torch.equal(out["y"], before)
    assert float(module.calls) == calls


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_that_lies_otherwise_gets_a_copy(device, backend):
    x = torch.randn(8, 8, device=device)
    compiled = graft.compile(lambda x: x.exp() + x, (x,), backend=backend)
    for own in (torch.empty(8, 8, device=device).t(), torch.empty(8, 16, device=device)[:, ::2]):
        assert compiled(x, out=own) is own
        torch.testing.assert_close(own, x.exp() + x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_that_cannot_be_written_is_refused_before_anything_runs(device, backend):
    module, (x, cache, pos), compiled = made(device, backend)
    for y, problem, kind in (
        (torch.empty(4, 8, device=device), r"out.y has the shape \(4, 8\), but its result has \(3, 8\)", OutRefused),
        (torch.empty(3, 8), "on cpu" if device == "cuda" else "no such case", OutRefused),
        (x, "out.y is written and shares memory with x", SharedMemoryError),
        (module.w[:3], "shares memory with a weight or buffer", SharedMemoryError),
    ):
        if problem != "no such case":
            with pytest.raises(kind, match=problem):
                compiled(x, cache, pos, out={"y": y, "more": (None, None)})
    assert float(module.calls) == 0 and not cache.any()
