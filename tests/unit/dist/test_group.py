"""What ranks must have in common, and what this process may be a rank of."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as distributed

from graft.base.errors import RanksDiffer, UsageError
from graft.dist.group import TorchGroup, connect, failed_rank
from graft.ops import ranks


@pytest.fixture
def alone():
    """A group of one rank, over gloo."""
    store = distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
    group = connect(0, 1, "gloo", lambda: store)
    yield group
    group.leave()


def test_a_group_sums_gathers_and_counts(alone):
    x = torch.randn(2, 3)
    assert torch.equal(alone.all_reduce(x), x) and torch.equal(alone.all_gather(x), x)
    assert alone.calls == 2 and alone.bytes == 2 * x.nbytes and alone.seconds > 0
    assert alone.least(7) == 7
    alone.agree("version", "1")
    alone.enter()
    assert ranks.current_group(1) is alone
    with pytest.raises(UsageError, match="a rank of another model already"):
        connect(0, 1, "gloo", pytest.fail)


def test_a_group_that_failed_to_begin_leaves_no_name_behind(monkeypatch):
    """Another rank, which did not fail, counts from 0: both would wait for each other's addresses."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none9")
    with pytest.raises(RuntimeError):
        distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    group = connect(0, 1, "gloo", distributed.HashStore)
    try:
        assert group.data.group_name == "0"
    finally:
        group.leave()


def test_a_broken_group_makes_room_for_another(alone):
    alone.enter()
    alone.broken = True
    store = distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
    again = connect(0, 1, "gloo", lambda: store)
    assert again.least(3) == 3


def test_ranks_that_differ_are_refused_by_name(monkeypatch):
    def gather(said, own, group):
        said[:] = [own, own, "torch 2.11"]

    monkeypatch.setattr(distributed, "all_gather_object", gather)
    group = TorchGroup(0, 3, "gloo", None, None)
    with pytest.raises(RanksDiffer, match=r"rank 2 has another version than rank 0 \(torch 2.11, not torch 2.13\)"):
        group.agree("version", "torch 2.13")


def test_a_lost_connection_is_told_as_another_ranks_end():
    """Where no process is watched; gloo says more than a line of it."""
    gloo = "[pair.cc:547] Connection closed by peer [127.0.0.1]:9. This may be caused by a remote worker. GLHF!"
    lost = failed_rank(RuntimeError(gloo))
    assert lost.rank is None and str(lost).startswith(
        "another rank failed: the connection to it is lost (Connection closed by peer); what it has printed says why."
    )
    assert "is lost (DistStoreError: timed out)" in str(failed_rank(distributed.DistStoreError("timed out")))
    assert "failed: ValueError: own" in str(failed_rank(ValueError("own")))
