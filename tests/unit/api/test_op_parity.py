"""Operators of torch's database through every route: as in eager, told or refused; and other outcomes are seen."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

import graft
from op_parity import DEFECTS, DTYPES, TOLD, Outcome, Sample, database, observe, outcome_of, stored, tried
from op_parity_page import read_page, table

SHARDS = 12
# a compilation of Inductor's takes seconds: of its routes every 24th entry; tests/op_parity.py has all
ROUTES = {"eager": 1, "cuda_graph": 1, "inductor": 24, "graft": 24}


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
    told = [
        ("a", "crash", ""),
        ("a", "same", ""),
        ("b", "refused", "it | cannot"),
        ("c", "crash", ""),
        ("d", "no sample", ""),
    ]
    lines = [Outcome(op, "eager", "float32", outcome, why, torch="2.13.0") for op, outcome, why in told]
    path.write_text("".join(json.dumps(asdict(line)) + "\n" for line in lines))
    text = table(list(stored(path).values()))
    assert "| 2.13.0 | cpu | eager | float32 | 3 | 3 | 1 | 0 | 1 | 0 | 0 | 1 |" in text
    assert "- it   cannot: `b` (eager float32 cpu 2.13.0)" in text and "- no word: `c` (eager" in text


def test_a_page_keeps_what_is_not_known_anew():
    before = table(
        [
            Outcome("a", "eager", "float32", "told", "it says", torch="2.11.0"),
            Outcome("a", "graft", "float32", "told", "it says", torch="2.11.0"),
            Outcome("b", "graft", "float32", "refused", "not (yet)", torch="2.11.0"),
        ]
    )
    anew = [Outcome("a", "graft", "float32", "same", torch="2.11.0")]
    text = table(anew, read_page(before))
    assert "| 2.11.0 | cpu | eager | float32 | 1 | 1 | 0 | 1 | 0 | 0 | 0 | 0 |" in text
    assert "| 2.11.0 | cpu | graft | float32 | 1 | 1 | 1 | 0 | 0 | 0 | 0 | 0 |" in text
    assert "- it says: `a` (eager float32 cpu 2.11.0)" in text and "not (yet)" not in text
    assert table(anew, read_page(text)) == text and "- not (yet): `b` (graft float32 cpu 2.11.0)" in before
    assert table([], read_page(before)) == before


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, "same"), (1.1, "wrong")])
def test_sixteen_bits_may_be_rounded_once_and_not_be_wrong(factor, outcome, monkeypatch):
    """A sum that eager rounds at every step, and the route in the end alone."""
    torch.manual_seed(0)
    x = (torch.randn(64, 1) + 5).bfloat16()

    def eager(x):
        total = x[0]
        for row in x[1:]:
            total = total + row
        return total

    def once(x):
        return (x.float().sum(0) * factor).to(x.dtype)

    monkeypatch.setattr("op_parity.run_route", lambda sample, _: (observe(once, (x,), None), ()))
    assert tried(sample(eager, x), "eager")[0] == outcome


def writes_a_part(x):
    first, second = torch.unsafe_split(x, 2)
    first.add_(1)
    return second, x.sum()


@pytest.mark.parametrize("route", ["eager", "inductor", "graft"])
@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.unsafe_split(x, 2),
        lambda x: torch.unsafe_chunk(x, 3, dim=1),
        lambda x: torch.ops.aten.unsafe_split_with_sizes(x, [1, 3]),
        writes_a_part,
    ],
)
def test_parts_are_views_as_in_eager_whatever_their_schema_says(route, program):
    assert tried(sample(program, torch.randn(4, 3)), route) == ("same", "")


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("program", "notes"),
    [
        (  # a graph without inputs is not transformed
            lambda: torch.randn(4) + torch.empty(4).fill_(1),
            ["it samples other random numbers", "uninitialised memory: %"],
        ),
        (
            lambda x: (torch.nn.functional.dropout(x, 0.5), x.new_empty(4)),
            ["it samples other random numbers", "uninitialised memory: result 1 holds values of %new_empty"],
        ),
        (lambda x: x.sin(), []),
    ],
)
def test_what_torch_compile_does_otherwise_is_in_the_report(program, notes):
    backend, inputs = graft.Backend(), [torch.randn(4)] * len(inspect.signature(program).parameters)
    torch._dynamo.reset()
    torch.compile(program, backend=backend)(*inputs)
    said = [note for note in backend.reports[0].notes if any(word in note for word in TOLD)]
    assert len(said) == len(notes) and all(text in note for text, note in zip(notes, said, strict=True)), said


@pytest.mark.parametrize("route", ["eager", "inductor"])
@pytest.mark.parametrize(("given", "mask"), [((1, 3), (4, 3)), ((), (5,)), ((4, 1), (1, 3)), ((4, 3), (3,))])
def test_a_mask_may_be_larger_than_what_it_selects_from(route, given, mask):
    everything = torch.ones(mask, dtype=torch.bool)
    assert tried(sample(torch.masked_select, torch.randn(given), everything), route) == ("same", "")
    assert tried(sample(torch.Tensor.masked_select, torch.randn(given), everything), "eager") == ("same", "")


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
    assert [one for one in found if one.outcome in DEFECTS] == []
