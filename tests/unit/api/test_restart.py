"""State that begins anew with a sequence: at position 0, or with another id."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graft
from graft.base.errors import PositionError, UsageError


class Decoder(nn.Module):
    """Keeps what it saw, and how often it was called; the old rows are read beyond `position`."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.full((4, 2), 0.5))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, x, position):
        self.cache.index_copy_(0, position, x)
        self.steps += 1
        return self.cache.sum(0) + self.steps


class Counted(nn.Module):
    """Writes where its own counter says; `sequence` is told and not used."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(3, 2))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, x, sequence):
        self.cache.index_copy_(0, self.steps, x)
        self.steps += 1
        return self.cache * 1


ROW = torch.ones(1, 2)


def decoded(call, positions=(0, 1, 2)):
    return [call(ROW * (position + 1), torch.tensor([position])) for position in positions]


@pytest.mark.parametrize("backend", ["eager", "cuda_graph"])
def test_position_zero_begins_anew(backend):
    compiled = graft.compile(Decoder(), (ROW, torch.tensor([1])), backend=backend, restart={"position": 0})
    memory = compiled.cache.data_ptr()
    for _ in range(2):
        torch.testing.assert_close(decoded(compiled), decoded(Decoder()), rtol=0, atol=0)
    assert compiled.steps == 3 and compiled.cache.data_ptr() == memory
    plain = graft.compile(Decoder(), (ROW, torch.tensor([1])), backend=backend)
    decoded(plain)
    assert not torch.equal(decoded(plain)[0], decoded(Decoder())[0])  # as in eager, where nobody resets
    plain.reset()
    torch.testing.assert_close(decoded(plain), decoded(Decoder()), rtol=0, atol=0)


def test_another_sequence_begins_anew():
    compiled = graft.compile(Counted(), (ROW, torch.tensor(7)), restart={"sequence": "changed"})
    for sequence in (7, 8, 7):
        reference = Counted()
        for step in range(3):
            given = ROW * (10 * sequence + step), torch.tensor(sequence)
            torch.testing.assert_close(compiled(*given), reference(*given), rtol=0, atol=0)
    with pytest.raises(PositionError):  # the same sequence goes on, beyond the end of the cache
        compiled(ROW, torch.tensor(7))
    compiled(ROW, torch.tensor(9))
    assert compiled.steps == 1


def test_the_input_is_found_and_told():
    by_position = graft.compile(Decoder(), (ROW, torch.tensor([1])), restart="auto")
    told = "restart: the program's state begins anew before a call whose position starts at 0"
    assert told in by_position.report.notes
    for _ in range(2):
        torch.testing.assert_close(decoded(by_position), decoded(Decoder()), rtol=0, atol=0)
    by_name = graft.compile(Counted(), (ROW, torch.tensor(7)), restart="auto")  # its own counter says where it writes
    assert any("whose sequence is another one" in note for note in by_name.report.notes)
    for sequence in (7, 8):
        reference = Counted()
        for _ in range(3):
            given = ROW, torch.tensor(sequence)
            torch.testing.assert_close(by_name(*given), reference(*given), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("module", "args", "said"),
    [
        (Decoder, (ROW, torch.tensor([1])), "also where position starts at 0; restart='auto' begins them anew there"),
        (Counted, (ROW, torch.tensor(7)), "also where sequence changes; restart='auto' begins them anew there"),
    ],
)
def test_a_module_that_goes_on_as_eager_does_is_told_of_restart(module, args, said):
    told = [note for note in graft.compile(module(), args).report.notes if note.startswith("state:")]
    assert len(told) == 1 and said in told[0]
    asked = graft.compile(module(), args, restart="auto").report.notes
    assert not [note for note in asked if note.startswith("state:")]


def test_nothing_is_said_of_restart_where_nothing_can_begin():
    """A caller's own cache, and positions in two inputs."""

    def step(cache, x, position):
        cache.index_copy_(0, position, x)
        return cache.sum()

    owned = graft.compile(step, (torch.zeros(4, 2), ROW, torch.tensor([1])))
    both = graft.compile(Sliced(), (torch.tensor([5, 6]), torch.tensor([1]), torch.tensor([2])))
    assert not [note for one in (owned, both) for note in one.report.notes if note.startswith("state:")]


class Sliced(nn.Module):
    """The position is a slice's, in one of two inputs, or in none: its own count of what came."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(8, 2))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))

    def forward(self, ids, first=None, second=None):
        at = torch.arange(ids.shape[0]) + (self.seen if first is None else first)
        if second is not None:
            at = at + second
        self.cache.index_copy_(0, at, ids[:, None].expand(-1, 2).float())
        self.seen += ids.shape[0]
        return self.cache * 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), r"restart='auto' found no input .*\(sequence, .*name one: restart=\{'INPUT': 0\}"),
        ((torch.tensor([1]), torch.tensor([2])), r"found first and second; name one: restart=\{'first': 0\}"),
    ],
)
def test_an_input_that_is_not_the_only_one_is_not_guessed(more, message):
    ids = torch.tensor([5, 6])
    with pytest.raises(UsageError, match=message):
        graft.compile(Sliced(), (ids, *more), restart="auto")
    one = graft.compile(Sliced(), (ids, torch.tensor([1])), restart="auto")
    one(ids, torch.tensor([2]))
    assert one(ids, torch.tensor([0]))[2:].abs().sum() == 0 and one.seen == 2


def test_a_loaded_module_knows_which_sequence_it_was_in(tmp_path):
    compiled = graft.compile(Counted(), (ROW, torch.tensor(7)), restart={"sequence": "changed"})
    compiled(ROW, torch.tensor(7))
    compiled.save(tmp_path / "saved")
    same, other = graft.load(tmp_path / "saved"), graft.load(tmp_path / "saved")
    same(ROW, torch.tensor(7))
    other(ROW, torch.tensor(8))
    assert same.steps == 2 and other.steps == 1


def test_rows_begin_together_or_are_refused():
    class Rows(Decoder):
        def forward(self, x, position):
            self.steps += 1
            return x + position.sum() + self.steps

    compiled = graft.compile(Rows(), (ROW, torch.tensor([[3, 4], [3, 4]])), restart={"position": 0})
    compiled(ROW, torch.tensor([[3, 4], [5, 6]]))
    with pytest.raises(UsageError, match="some rows of position start at 0"):
        compiled(ROW, torch.tensor([[0, 1], [5, 6]]))
    assert compiled.steps == 1
    compiled(ROW, torch.tensor([[0, 1], [0, 1]]))
    assert compiled.steps == 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"positoin": 0}, "no input is named 'positoin'; did you mean 'position'"),
        ({"position": 1}, r"restart\.position is 0 .* not 1"),
        ({"position": False}, "not False"),
        ({"position": "new"}, "not 'new'"),
        ({"x": 0}, "x must be integers, but is float32"),
        ({"x": 0, "position": 0}, "restart names one input"),
        ("position", "restart names one input"),
    ],
)
def test_what_restart_does_not_take(asked, message):
    with pytest.raises(UsageError, match=message):
        graft.compile(Decoder(), (ROW, torch.tensor([1])), restart=asked)


def test_programs_without_state_and_traces_are_told():
    def double(x, position):
        return x * position

    compiled = graft.compile(double, (ROW, torch.tensor([1])), restart={"position": 0})
    assert "restart has nothing to do: the program writes no buffer of its own" in compiled.report.notes
    with pytest.raises(UsageError, match="a graph cannot reset itself"):
        torch.export.export(compiled, (ROW, torch.tensor([1])))


def test_an_exported_program_begins_anew():
    program = torch.export.export(Decoder(), (ROW, torch.tensor([1])))
    compiled = graft.compile(program, restart={"position": 0})
    for _ in range(2):
        torch.testing.assert_close(decoded(compiled), decoded(Decoder()), rtol=0, atol=0)
