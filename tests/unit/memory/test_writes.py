"""Which calls write memory that outlives them, and which of them put a part at a position."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graft.ops  # noqa: F401  registers the op that a test calls, also where this file runs alone
from graft.ir.trace import export_graph
from graft.memory.writes import state_writes


class Program(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("state", torch.zeros(2, 4, 3))

    def forward(self, cache, pos, new):
        return self.function(self.state, cache, pos, new)


def writes(function):
    gm = export_graph(Program(function), (torch.zeros(2, 8, 3), torch.tensor([2]), torch.ones(2, 1, 3)))
    return [(str(w.node.target), w.owner.name, w.positional) for w in state_writes(gm)]


POSITIONAL = [
    lambda _s, c, p, n: c.index_copy_(1, p, n),
    lambda _s, c, p, n: c.index_put_((torch.arange(2), p), n[:, 0]),
    lambda _s, c, p, n: c.scatter_(1, p[None, :, None].expand(2, 1, 3), n),
    lambda _s, c, p, _n: c.scatter_(1, p[None, :, None].expand(2, 1, 3), 1.5),
    lambda _s, c, p, _n: c.index_fill_(1, p, 2.0),
    lambda _s, c, _p, n: c[:, 2:3].copy_(n),
    lambda _s, c, _p, n: c.narrow(1, 4, 1).copy_(n),
    lambda _s, c, _p, _n: c.select(1, 0).zero_(),
    lambda _s, c, _p, _n: c.transpose(0, 1)[3].fill_(1),
    lambda _s, c, _p, _n: c[:, 0].add_(1),
]


@pytest.mark.parametrize("function", POSITIONAL)
def test_writes_of_a_part_are_positional(function):
    ((_, owner, positional),) = writes(lambda *args: (function(*args), args[3] + 1)[1])
    assert positional and owner == "cache"


WHOLE = [
    lambda _s, c, _p, _n: c.add_(1),
    lambda _s, c, _p, _n: c.copy_(c.roll(1, 1)),
    lambda _s, c, _p, _n: c.transpose(0, 1).mul_(2),
    lambda _s, c, p, n: c.index_put_((torch.arange(2), p), n[:, 0], accumulate=True),
    lambda _s, c, p, n: c.index_add_(1, p, n),
]


@pytest.mark.parametrize("function", WHOLE)
def test_other_writes_are_not_positional(function):
    ((_, owner, positional),) = writes(lambda *args: (function(*args), args[3] + 1)[1])
    assert not positional and owner == "cache"


def test_writes_come_in_order_with_their_owners():
    def function(state, cache, pos, new):
        state.mul_(2)
        cache[:, 1:2] = new
        temporary = new.clone()
        temporary.add_(1)  # its own memory: no state
        torch._foreach_add_([state, cache], 1)
        return temporary

    found = writes(function)
    assert [owner for _, owner, _ in found] == ["state", "cache", "state", "cache"]
    assert [positional for *_, positional in found] == [False, True, False, False]


def test_a_reshape_that_copies_is_no_state():
    assert writes(lambda _s, c, _p, n: (c.transpose(0, 1).reshape(-1).zero_(), n + 1)[1]) == []
    assert len(writes(lambda _s, c, _p, n: (c.reshape(-1).zero_(), n + 1)[1])) == 1


def test_a_functional_program_writes_nothing():
    assert writes(lambda s, c, p, n: (c.index_copy(1, p, n), s + 1)) == []
    assert writes(lambda _s, c, p, n: c.clone().index_copy_(1, p, n)) == []
