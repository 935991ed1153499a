"""Ranks as threads: sums, gathers, and nobody who waits for a rank that failed."""

from __future__ import annotations

import pytest
import torch

from graft.base.errors import NoRanks
from graft.ops.ranks import as_rank, current_group, join, run_as_ranks

ops = torch.ops.graft


def test_every_rank_gets_the_sum_and_all_parts_in_order():
    parts = [torch.full((2, 3), float(10**rank)) for rank in range(3)]
    sums = run_as_ranks([lambda x=x: ops.all_reduce(x, 3) for x in parts])
    assert all(torch.equal(one, torch.full((2, 3), 111.0)) for one in sums)
    gathered = run_as_ranks([lambda x=x: ops.all_gather(x, 3) for x in parts])
    assert all(torch.equal(one, torch.cat(parts, -1)) for one in gathered)
    assert torch.equal(parts[0], torch.ones(2, 3))  # what goes in stays as it is


def test_several_exchanges_follow_each_other():
    def work(rank):
        x = torch.tensor([float(rank + 1)])
        for _ in range(20):
            x = ops.all_reduce(x, 2) / 2 + rank - 0.5
        return x

    one, other = run_as_ranks([lambda: work(0), lambda: work(1)])
    assert (one.item(), other.item()) == (1.0, 2.0)


def test_a_rank_that_fails_leaves_nobody_waiting():
    def fails():
        raise ValueError("no weights here")

    with pytest.raises(ValueError, match="no weights here"):
        run_as_ranks([lambda: ops.all_reduce(torch.ones(1), 2), fails])


def test_a_group_of_another_size_is_an_error():
    class Two:
        rank, world, broken = 0, 2, False

    with pytest.raises(NoRanks, match="this process has none"):
        current_group(4)
    with as_rank(Two()), pytest.raises(NoRanks, match="the group here has 2"):
        current_group(4)
    join(Two())
    try:
        assert current_group(2).world == 2
        Two.broken = True  # a rank is gone
        with pytest.raises(NoRanks, match="this process has none"):
            current_group(2)
    finally:
        join(None)


def test_one_rank_by_itself_needs_no_group():
    x = torch.randn(3)
    assert torch.equal(ops.all_reduce(x, 1), x) and torch.equal(ops.all_gather(x, 1), x)


def test_a_sum_that_is_normed_is_the_groups_own():
    """In a process that is a rank: the group's exchange, then the kernel that the norm has for the sum."""

    class Thrice:
        rank, world, broken = 0, 2, False

        def all_reduce(self, x):
            return x * 3

    x, residual, weight = torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.randn(8)
    join(Thrice())
    try:
        found = ops.all_reduce_add_norm(x, residual, weight, 2, 1e-5, 1.0, True)
    finally:
        join(None)
    expected = ops.add_rms_norm(x * 3, residual, weight, 1e-5, 1.0, True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    alone = ops.add_rms_norm(x, residual, weight, 1e-5, 1.0, True)
    assert not torch.allclose(found[0], alone[0], atol=1e-2), "its own part is another sum"
