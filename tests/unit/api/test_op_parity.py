"""Operators of torch's database through every route: as in eager, told or refused; and other outcomes are seen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from op_parity import DEFECTS, DTYPES, Outcome, Sample, database, outcome_of, stored, table, tried

SHARDS = 12
# a compilation of Inductor's takes seconds: of its routes every 24th entry; tests/op_parity.py has all
ROUTES = {"eager": 1, "cuda_graph": 1, "inductor": 24, "graft": 24}
# in eager its results are in the memory of its input, which its schema denies; Inductor copies
KNOWN = {("unsafe_split", "inductor"): "wrong", ("unsafe_split", "graft"): "wrong"}


def sample(op, *tensors, **kwargs):
    return Sample(op, SimpleNamespace(input=tensors[0], args=tuple(tensors[1:]), kwargs=kwargs))


def looks_at_the_graph(x):
    return x + 1 if torch.compiler.is_compiling() else x


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        (lambda x: (x.sin(), x.add_(1)), "same"),
        (lambda x: torch.log(-x.abs() - 1), "same"),  # not a number, in both
        (lambda x: torch.empty_like(x), "told"),
        (lambda x: torch.nonzero(x).tolist(), "refused"),
        (looks_at_the_graph, "wrong"),
        (lambda x: x.no_such_method(), "no sample"),
    ],
)
def test_what_became_of_a_sample_is_told(program, outcome):
    torch.manual_seed(0)
    x = torch.randn(4, 1000)
    found, why = tried(sample(program, x), "eager")
    assert found == outcome or (outcome == "told" and found == "same"), why  # fresh memory may be equal


def test_errors_that_are_not_grafts_are_raw(monkeypatch):
    def fails(*args):
        raise RuntimeError("first line\nsecond")

    monkeypatch.setattr("op_parity.run_route", fails)
    assert tried(sample(torch.sin, torch.ones(2)), "eager") == ("raw", "RuntimeError: first line")


def test_the_table_counts_and_gives_reasons(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(
        '{"op": "a", "route": "eager", "dtype": "float32", "outcome": "crash", "why": ""}\n'
        '{"op": "a", "route": "eager", "dtype": "float32", "outcome": "same", "why": ""}\n'
        '{"op": "b", "route": "eager", "dtype": "float32", "outcome": "refused", "why": "it | cannot"}\n'
        '{"op": "c", "route": "eager", "dtype": "float32", "outcome": "crash", "why": ""}\n'
        '{"op": "d", "route": "eager", "dtype": "float32", "outcome": "no sample", "why": ""}\n'
    )
    text = table(list(stored(path).values()))
    assert "| eager | float32 | 3 | 1 | 0 | 1 | 0 | 0 | 1 |" in text
    assert "- it   cannot: `b` (eager, float32)" in text and "`c` (eager, float32)" in text


@pytest.fixture(scope="module")
def entries():
    return database()


@pytest.mark.exhaustive
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("route", ROUTES)
def test_operators_are_as_in_eager_or_say_why_not(entries, route, dtype, shard):
    names = list(entries)[:: ROUTES[route]][shard::SHARDS]
    found: list[Outcome] = [outcome_of(entries[name], name, route, dtype) for name in names]
    assert [one for one in found if one.outcome in DEFECTS and KNOWN.get((one.op, route)) != one.outcome] == []
