"""Counters that programs of one kernel share: zeros of its own, at addresses that are alike to Triton."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from graft.ops import launch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_ring(monkeypatch):
    monkeypatch.setattr(launch, "RINGS", {})
    monkeypatch.setattr(launch, "RING", 64)


def test_every_call_has_its_own_at_an_aligned_address():
    given = [launch.counters(count, CPU) for count in (1, 3, 4, 5, 8, 1)]
    assert [len(one) for one in given] == [1, 3, 4, 5, 8, 1]
    places = [range(one.storage_offset(), one.storage_offset() + len(one)) for one in given]
    assert all(a.stop <= b.start for a, b in pairwise(places)), "none is given twice"
    assert {one.data_ptr() % 16 for one in given} == {0}, "else a kernel is compiled a second time for them"


def test_the_ring_begins_again_where_its_end_has_no_room():
    given = [launch.counters(30, CPU).storage_offset() for _ in range(5)]
    assert given == [0, 32, 0, 32, 0] and launch.ring(CPU).zeros.count_nonzero() == 0


def test_more_than_half_of_a_ring_is_memory_of_its_own():
    ring, own = launch.ring(CPU).zeros, launch.counters(33, CPU)
    assert len(own) == 33 and own.untyped_storage().data_ptr() != ring.untyped_storage().data_ptr()
