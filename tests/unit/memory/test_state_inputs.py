"""Caches that cannot be written as asked: an error before anything is written."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

import graft
from graft.base.errors import PositionError, ReadOnlyInput, ReplacedBuffer, SharedMemoryError, UsageError
from marks import short


class Cached(nn.Module):
    """Two caches, written at a position in two ways, and a counter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, k, v, x, position):
        self.steps.add_(1)
        k[:, :, position] = x
        v.index_copy_(2, position, x)
        return (k * v).sum()


def caches(length=8):
    return torch.zeros(1, 2, length, 4), torch.zeros(1, 2, length, 4)


X = torch.ones(1, 2, 1, 4)


@pytest.fixture(scope="module", params=short(["eager", "inductor"], "eager"))
def compiled(request):
    return graft.compile(Cached(), (*caches(), X, torch.tensor([3])), backend=request.param)


def inference_tensor():
    with torch.inference_mode():
        return torch.zeros(1, 2, 8, 4)


BAD = {
    "wrong device": (lambda k, v: (k.to("meta"), v, X, torch.tensor([1])), UsageError, "float32 on meta"),
    "wrong dtype": (lambda k, v: (k.bfloat16(), v, X, torch.tensor([1])), UsageError, "input k is torch.bfloat16"),
    "wrong shape": (lambda k, v: (k[..., :3], v, X, torch.tensor([1])), UsageError, "input k has the shape"),
    "wrong rank": (lambda k, v: (k[0], v, X, torch.tensor([1])), UsageError, "input k has the shape"),
    "expanded": (lambda k, v: (k[:, :1].expand(1, 2, 8, 4), v, X, torch.tensor([1])), ReadOnlyInput, "expanded"),
    "inference": (lambda k, v: (inference_tensor(), v, X, torch.tensor([1])), ReadOnlyInput, "inference_mode"),
    "same tensor": (lambda k, v: (k, k, X, torch.tensor([1])), SharedMemoryError, "k is written .* with v"),
    "a view of it": (lambda k, v: (k, k[:, :, :], X, torch.tensor([1])), SharedMemoryError, "shares memory"),
    "input in a cache": (lambda k, v: (k, v, k[:, :, :1], torch.tensor([1])), SharedMemoryError, "with x"),
    "too short": (lambda k, v: (k, v, X, torch.tensor([8])), PositionError, "position 8 of k, which has 8 in dim 2"),
    "negative": (lambda k, v: (k, v, X, torch.tensor([-1])), PositionError, "position -1 of v"),
    "not a tensor": (lambda k, v: (None, v, X, torch.tensor([1])), UsageError, "was a tensor"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_cache_is_refused_before_anything_is_written(compiled, name):
    make, error, message = BAD[name]
    k, v = caches()
    args = make(k, v)
    compiled.reset()
    with pytest.raises(error, match=message):
        compiled(*args)
    assert not k.any() and not v.any() and compiled.steps == 0


def test_what_is_right_is_not_refused(compiled):
    stacked = torch.zeros(2, 1, 2, 8, 4)  # K and V as parts of one tensor do not overlap
    compiled(stacked[0], stacked[1], X, torch.tensor([2]))
    assert stacked.sum() == 16 and stacked[:, :, :, 2].all()
    longer = caches(64)
    compiled(*longer, X, torch.tensor([40]))
    assert all(cache[:, :, 40].all() for cache in longer)
    transposed = torch.zeros(1, 8, 2, 4).transpose(1, 2), torch.zeros(1, 2, 4, 8).transpose(2, 3)
    compiled(*transposed, X, torch.tensor([7]))
    assert all(cache[:, :, 7].all() and cache.sum() == 8 for cache in transposed)


def test_slices_beyond_the_cache_are_refused_where_eager_writes_nothing():
    class Slice(nn.Module):
        def forward(self, cache, x, start):
            cache[:, :, start : start + x.shape[2]] = x
            return cache.sum()

    cache = torch.zeros(1, 2, 8, 4)
    silent = cache.clone()
    Slice()(silent, X, 8)
    assert not silent.any()  # eager loses the write without a word
    compiled = graft.compile(Slice(), (cache, X, 3), dynamic_shapes={"cache": None, "x": None, "start": Dim.DYNAMIC})
    with pytest.raises(PositionError, match="positions 8 to 8 of cache, which has 8 in dim 2"):
        compiled(cache, X, 8)
    compiled(cache, X, 7)
    assert cache.sum() == 8 and cache[:, :, 7].all()


def test_positions_that_counters_choose_are_checked_too():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("length", torch.tensor(0))
            self.register_buffer("cache", torch.zeros(1, 2, 4, 4))

        def forward(self, x):
            self.cache.index_copy_(2, torch.arange(x.shape[2]) + self.length, x)
            self.length.add_(x.shape[2])
            return self.cache.sum()

    compiled = graft.compile(Counts(), (X,))
    for _ in range(4):
        compiled(X)
    with pytest.raises(PositionError, match="position 4 of cache"):
        compiled(X)
    assert compiled.length == 4 and compiled.cache.sum() == 32


def test_a_position_that_is_known_too_late_is_in_the_report():
    class Late(nn.Module):
        def forward(self, cache, x):
            cache.index_copy_(2, x.sum().long()[None], x)
            return cache.sum()

    compiled = graft.compile(Late(), (torch.zeros(1, 2, 16, 4), X))
    assert any("is not checked: it is computed from" in note for note in compiled.report.notes)
    with pytest.raises((IndexError, RuntimeError)):  # the op's own check
        compiled(torch.zeros(1, 2, 4, 4), X)


def test_a_replaced_buffer_is_never_ignored():
    module = Cached()
    compiled = graft.compile(module, (*caches(), X, torch.tensor([3])))
    with pytest.raises(ReplacedBuffer, match="the buffer steps was replaced"):
        compiled.steps = torch.tensor(5)
    compiled.steps.fill_(5)
    compiled(*caches(), X, torch.tensor([1]))
    assert compiled.steps == 6 == module.steps
    compiled.load_state_dict({**compiled.state_dict(), "graph_module.steps": torch.tensor(9)})
    compiled(*caches(), X, torch.tensor([1]))
    assert compiled.steps == 10
    compiled.graph_module.steps = torch.tensor(5)
    k, v = caches()
    with pytest.raises(ReplacedBuffer, match="compile the module again"):
        compiled(k, v, X, torch.tensor([1]))
    assert not k.any()
