"""Programs of the classes that other compilers' suites cover, through graft's public API on every route."""

from __future__ import annotations

from collections import Counter

import pytest
from peer_aliased_io import ALIASED_IO
from peer_batches import Together, batches, fits, inputs_of, look_at_all
from peer_compare import compare, observe
from peer_custom_ops import CUSTOM_OPS
from peer_dispatch import DISPATCH
from peer_fusions import FUSIONS
from peer_indexed_writes import INDEXED_WRITES
from peer_layouts import LAYOUTS
from peer_mutation import MUTATION
from peer_programs import Program
from peer_routes import compiled_on, reports
from peer_transforms import TRANSFORMS

from graft.base.errors import GraftError

TABLES = (MUTATION, INDEXED_WRITES, DISPATCH, LAYOUTS, CUSTOM_OPS, ALIASED_IO, TRANSFORMS, FUSIONS)
PROGRAMS = [program for table in TABLES for program in table.programs]


def on(*routes: str, tables=TABLES, alone=False, short=()):
    """One case for each route and program, those with a gap as strict xfails; `alone`: what no batch takes in;
    `short`: the programs of the short run, on all of these routes or on the one that is named."""
    cases = [
        (route, program)
        for table in tables
        for program in table.programs
        for route in routes
        if route in (program.routes or routes) and not (alone and fits(program, route))
    ]

    def case(route: str, program: Program):
        reason = program.gaps.get(route, program.gaps.get(""))
        marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
        name = f"{route}-{program.name}"
        marks += [] if {name, program.name} & {*short} else [pytest.mark.exhaustive]
        return pytest.param(route, program, id=name, marks=marks)

    return pytest.mark.parametrize(("route", "program"), [case(*entry) for entry in cases])


def check(route: str, program: Program) -> None:
    subject, twin = program.make(), program.make()
    refusal = program.refused.get(route, program.refused.get(""))
    args, given = program.inputs(), program.inputs()
    if refusal is not None:
        with pytest.raises(GraftError, match=refusal), compiled_on(route, program, subject) as compiled:
            observe(compiled, args, subject)
        return
    with compiled_on(route, program, subject) as compiled:
        for _ in range(program.calls):
            expected = observe(twin, given, twin)
            got = observe(compiled, args, subject)
            compare(got, expected, layouts=program.layouts, close=program.close)
        fired = Counter({n: len(r.matches) for rep in reports(compiled) for n, r in rep.transforms.items()})
    if route == "dynamo-dynamic":
        return  # every size is dynamic there, those of heads and features too: values are held, not counts
    # on Dynamo's graphs weights are inputs, which nothing merges
    wanted = {
        name: count for name, count in program.fires.items() if "merge" not in name or hasattr(compiled, "report")
    }
    assert {name: fired[name] for name in wanted} == wanted, +fired


def together(*routes: str, short):
    """One case for each route and batch; `short`: those of the short run."""
    cases = {f"{route}-{name}": (route, group) for route in routes for name, group in batches(TABLES, route)}
    assert cases.keys() >= {*short}

    def case(name: str):
        return pytest.param(*cases[name], id=name, marks=[] if name in short else [pytest.mark.exhaustive])

    return pytest.mark.parametrize(("route", "programs"), [case(name) for name in cases])


@together(
    "passes",
    "dynamo-dynamic",
    "inductor",
    "torch.compile",
    short=(*("passes-custom_ops_0", "dynamo-dynamic-mutation_0"),),
)
def test_together(route, programs):
    subject, twin = Together(programs), Together(programs)
    (args,), (given,) = inputs_of(programs), inputs_of(programs)
    batch = Program("together", Together, lambda: inputs_of(programs))
    with compiled_on(route, batch, subject) as compiled:
        for _ in range(min(program.calls for program in programs)):
            expected = look_at_all(twin, given, twin)
            got = look_at_all(compiled, args, subject)
            for program, *seen in zip(programs, got, expected, strict=True):
                try:
                    compare(*seen, layouts=program.layouts, close=program.close)
                except AssertionError as error:
                    raise AssertionError(f"{program.name}: {error}") from error


# half of what a batch does not take in, and a sixth of what it does
SPECIAL = [program for program in PROGRAMS if program.fires or not fits(program, "eager")]
PLAIN = [program for program in PROGRAMS if program not in SPECIAL]


@on(
    "eager", "passes", "dynamo", "dynamo-dynamic",
    short=[f"eager-{program.name}" for program in (*SPECIAL[::2], *PLAIN[::6])],
)  # fmt: skip
def test_alone(route, program):
    check(route, program)


@on("inductor", "torch.compile", alone=True, short=["torch.compile-custom_ops.last_row_at_a_dynamic_size"])
def test_alone_with_generated_code(route, program):
    check(route, program)


@on("cuda_graph", tables=(ALIASED_IO,), short=["aliased_io.owned_cache", "aliased_io.one_token_by_assignment"])
def test_replayed(route, program):
    check(route, program)


def test_names_are_unique_and_there_are_enough():
    names = [program.name for program in PROGRAMS]
    assert len(set(names)) == len(names) >= 150
