"""Memory that was never written is named where it reaches a result or state, and nowhere else."""

from __future__ import annotations

from operator import getitem

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

import graft
from graft.memory.uninitialised import uninitialised_notes
from marks import examples

aten = torch.ops.aten


def notes(program, *args, **options):
    found = graft.compile(program, args, **options).report.notes
    return [note.removeprefix("uninitialised memory: ") for note in found if note.startswith("uninitialised")]


def several(x):
    part = torch.empty(4)
    part[:3] = x
    put = x.new_empty(3)
    put[torch.tensor([0, 1, 2])] = x
    done = torch.empty_like(x).copy_(x)
    added = torch.add(x, x, out=torch.empty(3))
    return done, x + torch.empty(3), part, put, added, torch.zeros_like(torch.empty(3)), torch.empty(0, 3).sum(0)


def test_each_result_is_named_with_its_memory_and_the_reason():
    found = notes(several, torch.zeros(3))
    assert [note.partition(" holds")[0] for note in found] == ["result 1", "result 2", "result 3"]
    assert "which nothing has written" in found[0]
    assert "of which only a part is written" in found[1]
    assert "at positions that are known at run time only" in found[2]


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, x):
        self.kept.add_(torch.empty(3))
        return x


def test_state_is_named_with_the_node_that_writes_it():
    (note,) = notes(Keeps(), torch.zeros(3))
    assert "add_" in note and note.endswith("which nothing has written into kept")


@pytest.mark.parametrize(("whole", "expected"), [(True, 0), (False, 1)])
def test_symbolic_sizes_count_as_written_where_all_of_it_is(whole, expected):
    def program(x):
        made = torch.empty_like(x)
        (made if whole else made[:2]).copy_(x if whole else x[:2])
        return made * 2

    assert len(notes(program, torch.ones(5), dynamic_shapes={"x": {0: Dim.DYNAMIC(min=3)}})) == expected


step = st.tuples(
    st.sampled_from(["copy", "fill", "zero", "add", "rows", "column"]), st.integers(0, 5), st.integers(1, 6)
)


def run(steps, through, x):
    """Writes into parts of one empty matrix; the result is read through `through`."""
    made = torch.empty(6, 4)
    for kind, start, size in steps:
        part = made[start : start + size]
        if kind == "copy":
            part.copy_(x[: part.shape[0]])
        elif kind == "fill":
            part.fill_(2.0)
        elif kind == "zero":
            part[:, 1:3].zero_()
        elif kind == "add":
            part.add_(1.0)
        elif kind == "rows":
            made.view(3, 8)[start % 3] = 1.0
        else:
            made[:, start % 4] = x[0, 0]
    return {"all": made, "sum": made.sum(), "rows": made[2:4] * 2, "transposed": made.t().exp()}[through]


@settings(max_examples=examples(60))
@given(steps=st.lists(step, max_size=6), through=st.sampled_from(["all", "sum", "rows", "transposed"]))
def test_it_is_named_exactly_where_it_reaches_the_result(steps, through):
    x = torch.ones(6, 4)
    found = notes(lambda x: run(steps, through, x), x)
    torch.use_deterministic_algorithms(True)  # fills empty memory with NaN
    try:
        unwritten = bool(run(steps, through, x).isnan().any())
    finally:
        torch.use_deterministic_algorithms(False)
    assert bool(found) == unwritten


def test_memory_that_a_branch_gives_back():
    def program(x):
        return torch.cond(x.sum() > 0, lambda a: torch.empty(3), lambda a: a * 2, (x,)), x + 1

    (note,) = notes(program, torch.ones(3))
    assert note.startswith("result 0 holds values of %true_graph_0_empty")

    def written(x):
        return torch.cond(x.sum() > 0, lambda a: torch.empty(3).copy_(a), lambda a: a * 2, (x,))

    assert notes(written, torch.ones(3)) == []


def test_memory_that_grows():
    def program(x):
        grown, filled, shrunk = x.clone().resize_(5), x.clone().resize_(5), x.clone().resize_(2)
        filled[3:] = 0
        return grown, filled, shrunk, grown[:3] * 2

    (note,) = notes(program, torch.ones(3))
    assert note.startswith("result 0 holds values of %resize_") and "only a part is written" in note


def test_lists_that_are_written_at_once():
    def program(x):
        one, two = torch.empty(3), torch.empty(3)
        torch._foreach_copy_([one], [x])
        torch._foreach_add_([two], [x])
        return one, two

    (note,) = notes(program, torch.ones(3))
    assert note.startswith("result 1 holds")


def test_each_note_says_what_it_is_about_once():
    (note,) = (n for n in graft.compile(Keeps(), (torch.ones(3),)).report.notes if n.startswith("uninitialised"))
    assert note.count("uninitialised memory") == 1


@pytest.mark.parametrize(("dropout_p", "unwritten"), [(0.0, [2, 3]), (0.5, [])])
def test_the_state_of_random_numbers_that_nobody_sampled(dropout_p, unwritten):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(
        aten._efficient_attention_forward.default, (x, x, x, None, None, None, 4, 4, dropout_p, 0)
    )
    results = [graph.call_function(getitem, (call, index)) for index in range(4)]
    graph.output(results)
    for node in (x, *results):
        node.meta["val"] = torch.empty(2)
    found = uninitialised_notes(torch.fx.GraphModule(nn.Module(), graph))
    assert [note.partition(" holds")[0] for note in found] == [f"uninitialised memory: result {i}" for i in unwritten]
