"""Random programs over state: eager and compiled agree on results, buffers, the caller's memory and who shares it.

What is proven, on each backend, for PROGRAMS programs called three times in a row: every result of
every step, every buffer, every tensor of the caller and the memory around it are bit for bit those of eager; nothing
that outlives a call moves; and a write into a result afterwards shows in the same places. Programs go through
`graft.compile` many at a time, as submodules of one module: that is one graph, so Inductor also fuses, reorders and
reuses buffers across programs, which is harder than one at a time. On `inductor` this is its generated and compiled
C++. What is not proven: vectorised kernels, which are switched off here because they take half of the time of code
generation and have no part in what is written where (the other tests of state run with them); symbolic sizes; GPUs.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from graft.ir.effects import is_mutating
from marks import FULL, examples, short
from state_checks import compiled, differences, smallest
from state_programs import Program
from state_statements import DTYPES, programs

os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # the instruction sets of this machine are not tried out
# 260 and 195, with `make fuzz` 520 on each backend, in the short run a third for one dtype each;
# no 64-bit integers on inductor, where they take twice as long to compile
MANY = 2 if os.environ.get("HYPOTHESIS_PROFILE") == "fuzz" else 1
PROGRAMS = {
    "eager": dict.fromkeys(DTYPES, examples(65) * MANY),
    "inductor": {
        torch.float32: 65 * MANY * MANY,
        torch.bfloat16: 65 * MANY,
        torch.int8: (65 if FULL else 10) * MANY,
    },
}
CASES = [(backend, dtype) for backend, counts in PROGRAMS.items() for dtype in counts]
BATCH = 65


def collect(dtype: torch.dtype, count: int) -> list[Program]:
    """The first `count` different programs that hypothesis draws; the same ones in every run."""
    found: dict[tuple[str, ...], Program] = {}

    @seed(DTYPES.index(dtype))
    @settings(
        max_examples=2 * count,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a failing program is made smaller by `smallest`, one compilation a line
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(dtype))
    def run(program: Program) -> None:
        found.setdefault(program.lines, program)

    run()
    assert len(found) >= count, f"hypothesis drew {len(found)} different programs"
    return list(found.values())[:count]


def report(batch: list[Program], found: dict[int, str], backend: str) -> str:
    """The first program that differs, as short as it can be and still differ, if it does so alone."""
    place, problem = next(iter(found.items()))

    def fails(program: Program) -> bool:
        return bool(differences([program], lambda worlds: compiled(worlds, backend)))

    alone = fails(batch[place])
    subject = smallest(batch[place], fails) if alone else batch[place]
    note = "" if alone else " (only together with the others of its batch)"
    return f"{len(found)} of {len(batch)} differ; {problem}{note}\n{subject.text}"


@pytest.mark.parametrize(("backend", "dtype"), short(CASES, ("eager", torch.float32)), ids=str)
def test_programs_agree_with_eager(backend, dtype):
    subjects = collect(dtype, PROGRAMS[backend][dtype])
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        for first in range(0, len(subjects), BATCH):
            batch = subjects[first : first + BATCH]
            found = differences(batch, lambda worlds: compiled(worlds, backend))
            assert not found, report(batch, found, backend)


def test_programs_write_and_a_lost_write_is_seen():
    """Of programs whose last write is taken out of the graph most differ from eager: the comparison can fail."""
    subjects = [program for program in collect(torch.float32, 30) if writes(program)][:10]
    assert len(subjects) == 10
    found = differences(subjects, lambda worlds: compiled(worlds, "eager", forget_writes))
    assert len(found) >= 7, found


def writes(program: Program) -> bool:
    return any(line.startswith(("self.a.", "self.b.", "p.", "q.", "self.a[", "p[", "q[")) for line in program.lines)


def forget_writes(graph: torch.fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if is_mutating(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
