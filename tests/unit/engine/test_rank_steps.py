"""What rank 0 tells of a step and of copies, and what another rank then does on its own caches and states."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from graft.base.errors import RankFailed
from graft.dist.group import TorchGroup
from graft.dist.messages import Messages
from graft.engine.kv.moves import Copy
from graft.engine.kv.states import StateCache
from graft.engine.ranks.follow import follow
from graft.engine.ranks.leader import lead
from graft.ops.layout import INPUTS
from graft.ops.packed_states import StateShape


class Rank:
    """An engine with two caches, and states where it has recurrent layers; its graph keeps what it was given."""

    def __init__(self, recurrent):
        self.tensors = [torch.zeros(4, 2, 1, 3) for _ in range(2)]
        self.states = StateCache([StateShape((2,), torch.float32)], 3, torch.device("cpu")) if recurrent else None
        self.move, self.given = None, []

    def graph(self, *inputs):
        self.given.append(inputs)
        return ("logits",)


@pytest.fixture
def wire(monkeypatch):
    """What one end sends, in the order in which the other receives it."""
    sent = []
    monkeypatch.setattr(Messages, "send", lambda _, kind, tensors=(): sent.append((kind, [*tensors])))
    monkeypatch.setattr(Messages, "receive", lambda _: sent.pop(0))
    return sent


def both(recurrent):
    first, second, group = Rank(recurrent), Rank(recurrent), TorchGroup(0, 2, "gloo", None, None)
    second.graph = partial(Rank.graph, second)
    lead(first, SimpleNamespace(rank=0, group=group), None)
    return first, second, group


def step(engine, slots=()):
    batch = [torch.full((1, 2), index) for index in range(len(INPUTS))]
    states = () if engine.states is None else engine.states.inputs(slots)
    return engine.graph(*batch, *engine.tensors, *states)


@pytest.mark.parametrize("recurrent", [False, True])
def test_another_rank_runs_the_same_batch_on_its_own_caches_and_states(wire, recurrent):
    first, second, _ = both(recurrent)
    assert step(first, [2, 0]) == ("logits",)
    first.graph.close()
    follow(second, None, pytest.fail)
    (given,) = second.given
    assert [int(one[0, 0]) for one in given[: len(INPUTS)]] == [*range(len(INPUTS))]
    own = [*second.tensors, *([] if second.states is None else second.states.tensors)]
    rest = [*given[len(INPUTS) :]]
    if recurrent:
        assert rest.pop(len(second.tensors)).tolist() == [2, 0]
    assert all(one is other for one, other in zip(rest, own, strict=True))


def test_states_and_blocks_are_copied_on_both(wire):
    first, second, _ = both(recurrent=True)
    for engine in (first, second):
        engine.tensors[1][2] = 5.0
        engine.states.tensors[0][1] = 3.0
    first.move(first.tensors, [Copy(2, 0)])
    first.states.copy(1, 2)
    first.graph.close()
    follow(second, None, pytest.fail)
    for engine in (first, second):
        assert engine.tensors[1][0].unique().tolist() == [5.0] and engine.tensors[0].unique().tolist() == [0.0]
        assert engine.states.tensors[0].tolist() == [[0.0, 0.0], [3.0, 3.0], [3.0, 3.0]]


@pytest.mark.usefixtures("wire")
def test_a_step_whose_kernels_gave_up_is_lost(monkeypatch):
    """A rank died while a kernel waited for it: the numbers are nobody's, and nothing is taken any more."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    first, _, group = both(recurrent=False)
    let_go = []
    group.peers[16] = SimpleNamespace(let_go=lambda: let_go.append(True))
    step(first)
    first.graph.graph = lambda *_: first.graph.gone(RankFailed(1, "it was killed by signal 9"))
    with pytest.raises(RankFailed, match="never wrote its part of a sum"):
        step(first)
    assert let_go and group.broken
    with pytest.raises(RankFailed):
        step(first)
