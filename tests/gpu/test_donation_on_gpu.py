"""Donated memory on a GPU: results in the caller's tensor at every replay, no copy of it, and no second cache."""

from __future__ import annotations

import pytest
import torch

import graft
from graft.base.errors import DonationRefused, SharedMemoryError
from graft.memory.alias_map import Alias

BACKENDS = ["eager", "cuda_graph", "inductor"]


def step(x, cache, pos):
    """A functional program: its caller's cache stays as it is."""
    new = cache.index_copy(1, pos, x[:, None])
    return new.sum(1), new


def arguments(device):
    return (
        torch.randn(2, 8, device=device),
        torch.randn(2, 16, 8, device=device),
        torch.tensor([3], device=device),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_update_goes_into_the_donated_cache(device, backend):
    x, cache, pos = arguments(device)
    compiled = graft.compile(step, (x, cache, pos), backend=backend, donate=("cache",))
    assert compiled.aliases == (Alias("index_copy__default", "cache", "user"),) and compiled.backend == backend
    for at in (3, 5, 0, 15):
        x, pos = torch.randn(2, 8, device=device), torch.tensor([at], device=device)
        wanted = step(x, cache.clone(), pos)
        total, new = compiled(x, cache, pos)
        assert new.data_ptr() == cache.data_ptr() and new.shape == cache.shape
        torch.testing.assert_close(total, wanted[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(cache, wanted[1])
    other = torch.randn(2, 16, 8, device=device)  # of another caller
    before, wanted = cache.clone(), step(x, other.clone(), pos)[1]
    new = compiled(x, other, pos)[1]
    assert new.data_ptr() == other.data_ptr() and torch.equal(other, wanted) and torch.equal(cache, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_value_that_is_computed_anew_lies_there(device, backend):
    def program(s, x):
        return s * 0.5 + x

    s, x = torch.randn(64, device=device), torch.randn(64, device=device)
    compiled = graft.compile(program, (s, x), backend=backend, donate=["s"])
    for _ in range(3):
        wanted = program(s.clone(), x)
        new = compiled(s, x)
        assert new.data_ptr() == s.data_ptr()
        torch.testing.assert_close(s, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "cuda_graph"])
def test_what_is_not_safe_is_refused(device, backend):
    x, cache, pos = arguments(device)
    with pytest.raises(DonationRefused, match="the old value of %cache is read by"):
        graft.compile(lambda x, cache, pos: (step(x, cache, pos)[1], cache.sum()), (x, cache, pos), donate=("cache",))
    compiled = graft.compile(step, (x, cache, pos), backend=backend, donate=("cache",))
    before = cache.clone()
    with pytest.raises(SharedMemoryError, match="cache is written and shares memory with x"):
        compiled(cache[:, 0], cache, pos)
    assert torch.equal(cache, before)


@torch.no_grad()
def test_a_replay_needs_no_second_cache():
    cache, x = torch.zeros(1, 4096, 64, device="cuda"), torch.ones(1, 64, device="cuda")  # 1 MiB
    pos = torch.tensor([3], device="cuda")
    peaks = {}
    for donate in ((), ("cache",)):
        compiled = graft.compile(step, (x, cache, pos), backend="cuda_graph", donate=donate)
        result = [compiled(x, cache, pos) for _ in range(2)][-1]  # noqa: F841 (it is held)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        new = compiled(x, cache, pos)[1]
        peaks[donate] = torch.cuda.max_memory_allocated() - before
        assert (new.data_ptr() == cache.data_ptr()) == bool(donate)
    assert peaks[("cache",)] < cache.nbytes <= peaks[()]
