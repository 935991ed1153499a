"""Positions known when the graph is made or at each call, lengths that vary, rows at different positions."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

from marks import short
from state_cases import BACKENDS, Case, agree, agree_all, whole

H, S, D = 2, 16, 4
PLACES = (3, 0, 15)


def slice_at(self, cache, x, p):
    """cache [b, h, s, d], x [b, h, 1, d], p an int."""
    cache[:, :, p : p + 1] = x
    return cache.sum(2)


def index_at(self, cache, x, p):
    """p a tensor of one dim, or of none."""
    cache[:, :, p] = x if p.dim() else x[:, :, 0]
    return cache.sum(2)


def index_copy_at(self, cache, x, p):
    cache.index_copy_(2, p, x)
    return cache.sum(2)


def row_at(self, cache, x, p):
    """p [b]: every row of the batch at its own position."""
    cache[torch.arange(cache.shape[0]), :, p] = x[:, :, 0]
    return cache.sum(2)


def rows_by_scatter(self, cache, x, p):
    cache.scatter_(2, p.view(-1, 1, 1, 1).expand(x.shape), x)
    return cache.sum(2)


def case(function, positions, batch=1, dtype=torch.float32):
    steps = [(whole(batch, H, 1, D, dtype=dtype, seed=i), p) for i, p in enumerate(positions)]
    return Case(function, steps, caches=(whole(batch, H, S, D, dtype=dtype, seed=9),))


@pytest.mark.parametrize("backend", short(BACKENDS, "eager"))
def test_an_int_is_fixed_in_the_graph(backend):
    agree(case(slice_at, (3, 3, 3)), backend)


@pytest.mark.parametrize("backend", short(BACKENDS, "eager"))
@pytest.mark.parametrize("batch", [1, 4])
def test_an_int_that_varies(backend, batch):
    agree(case(slice_at, (*PLACES, 1), batch), backend, dynamic_shapes={"args": (None, None, Dim.DYNAMIC)})


@pytest.mark.parametrize("backend", short(BACKENDS, "eager"))
def test_a_position_as_a_tensor_without_dims(backend):
    agree(case(index_at, [torch.tensor(p) for p in PLACES], 4), backend)


@pytest.mark.parametrize("backend", short(BACKENDS, "eager"))
def test_positions_as_tensors_of_one_dim(backend):
    cases = {}
    for batch in (1, 4):
        one = [torch.tensor([p]) for p in PLACES]
        rows = [(torch.arange(batch) * 5 + p) % S for p in PLACES]
        for name, function, positions in (
            ("index", index_at, one),
            ("index_copy", index_copy_at, one),
            ("a position for each row", row_at, rows),
            ("a position for each row, scatter", rows_by_scatter, rows),
        ):
            cases[f"{name}, batch {batch}"] = case(function, positions, batch)
    for dtype in (torch.bfloat16, torch.int8):
        cases[f"rows {dtype}"] = case(row_at, [torch.tensor([1, 2, 3, p]) for p in PLACES], 4, dtype)
    agree_all(cases, backend)


def attend(self, k, v, x, at):
    """k, v [b, h, s, d] of the caller; x [b, h, n, d] is written at `at` [n] and attends up to its position."""
    k.index_copy_(2, at, x)
    v[:, :, at] = x + 1
    mask = torch.arange(k.shape[2]) <= at[:, None]
    scores = (x @ k.transpose(2, 3)).masked_fill(~mask, float("-inf"))
    self.seen += at.shape[0]
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("backend", short(BACKENDS, "eager"))
@pytest.mark.parametrize("batch", [1, 4])
def test_prefill_of_seven_then_decode_of_one(backend, batch):
    lengths = (7, 1, 1, 3)
    starts = (0, 7, 8, 9)
    steps = [
        (torch.randn(batch, H, n, D, generator=torch.Generator().manual_seed(n)), torch.arange(first, first + n))
        for n, first in zip(lengths, starts, strict=True)
    ]
    caches = (torch.zeros(batch, H, S, D), torch.zeros(batch, H, S, D))
    subject = Case(attend, steps, caches, {"seen": torch.zeros(1, dtype=torch.int64)})
    agree(subject, backend, dynamic_shapes={"args": (None, None, {2: Dim.DYNAMIC}, {0: Dim.DYNAMIC})})
