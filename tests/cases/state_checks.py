"""Eager and compiled side by side over several steps: results, buffers, the caller's memory, and who shares it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import graft
from state_cases import Together
from state_programs import STEPS, Caller, Program


@dataclass
class World:
    """One module with its caller's tensors, and all that it returned."""

    module: nn.Module
    caller: Caller
    results: list[list[Tensor]] = field(default_factory=list)
    # Results in the memory of a buffer that was assigned anew. Eager's buffer is that result from then on; a compiled
    # one keeps its memory, and the result has its own. The values are the same until someone writes into either.
    loose: set[str] = field(default_factory=set)
    initial: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.initial = list(self.module.buffers())

    def memory(self) -> dict[str, Tensor]:
        """All that outlives a call, by name."""
        found = {f"self.{name}": buffer for name, buffer in self.module.named_buffers()}
        found |= {f"the memory of {name}": owner for name, owner in zip("pq", self.caller.owners, strict=True)}
        for step, (x, at) in enumerate(self.caller.plain):
            found |= {f"x of step {step}": x, f"at of step {step}": at}
        for step, results in enumerate(self.results):
            found |= {f"result {place} of step {step}": value for place, value in enumerate(results)}
        return found


def worlds(programs: Sequence[Program]) -> list[World]:
    return [World(program.module(), program.caller()) for program in programs]


def run_eager(these: list[World], step: int) -> None:
    with torch.no_grad():
        for world in these:
            first = {memory_of(buffer) for buffer in world.initial}
            world.results.append(list(world.module(*world.caller.args(step)) or ()))
            assigned = {memory_of(buffer) for buffer in world.module.buffers()} - first
            results = enumerate(world.results[-1])
            world.loose |= {f"result {place} of step {step}" for place, v in results if memory_of(v) in assigned}


def memory_of(value: Tensor) -> int:
    return value.untyped_storage()._cdata


Step = Callable[[list[World], int], None]


def compiled(these: list[World], backend: str, edit: Callable[[torch.fx.Graph], None] | None = None) -> Step:
    """`graft.compile` for all of them at once. `edit` spoils the graph, to see that the comparison notices."""
    module, inputs = Together([world.module for world in these]), [world.caller.args(0) for world in these]
    fixed = {"inputs": [tuple({} for _ in args) for args in inputs]}  # one capture: no cache is to grow here
    call: Any = graft.compile(module, (inputs,), dynamic_shapes=fixed, backend=backend)
    if edit is not None:
        call = call.graph_module
        edit(call.graph)
        call.recompile()

    def run(these: list[World], step: int) -> None:
        results = call([world.caller.args(step) for world in these])
        for world, result in zip(these, results, strict=True):
            world.results.append(list(result or ()))

    return run


def differences(programs: Sequence[Program], prepare: Callable[[list[World]], Step]) -> dict[int, str]:
    """What is not as in eager, by place of the program."""
    expected, got = worlds(programs), worlds(programs)
    before = [{name: value.data_ptr() for name, value in world.memory().items()} for world in got]
    run, found = prepare(got), {}
    for step in range(STEPS):
        run_eager(expected, step)
        run(got, step)
        for place, (left, right) in enumerate(zip(expected, got, strict=True)):
            problem = values_differ(left, right, step) or moved(before[place], right)
            if problem and place not in found:
                found[place] = f"after step {step} {problem}"
    for place, (left, right) in enumerate(zip(expected, got, strict=True)):
        problem = place not in found and sharing_differs(left, right)
        if problem:
            found[place] = problem
    return found


def values_differ(expected: World, got: World, latest: int | None = None) -> str | None:
    """What is not as in eager. Loose results are looked at in their own step, the `latest`, alone."""
    left, right = expected.memory(), got.memory()
    if left.keys() != right.keys():
        return f"{left.keys() ^ right.keys()} is not on both sides"
    for name, value in left.items():
        other = right[name]
        if name in expected.loose and not name.endswith(f"step {latest}"):
            continue
        if (value.shape, value.dtype) != (other.shape, other.dtype):
            return f"{name} is {other.dtype} {tuple(other.shape)}, in eager {value.dtype} {tuple(value.shape)}"
        if not torch.equal(value, other):
            return f"{name} is\n{other}\nin eager\n{value}"
    return None


def moved(before: dict[str, int], got: World) -> str | None:
    now = got.memory()
    return next(
        (f"{name} lies elsewhere" for name, pointer in before.items() if now[name].data_ptr() != pointer), None
    )


def sharing_differs(expected: World, got: World) -> str | None:
    """Writes into one result after the other; all that shares its memory must show it, and nothing else."""
    left, right = expected.memory(), got.memory()
    for sentinel, name in enumerate(list(left)[-3 * STEPS :], start=40):
        if not name.startswith("result") or name in expected.loose or has_repeats(left[name]):
            continue
        left[name].fill_(sentinel)
        right[name].fill_(sentinel)
        problem = values_differ(expected, got)
        if problem:
            return f"after a write into {name} {problem}"
    return None


def has_repeats(value: Tensor) -> bool:
    """Broadcast: one place for many elements, which no one may write."""
    return any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True))


def smallest(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Takes away lines, the last first, as long as eager still runs and the program still fails."""
    for place in reversed(range(len(program.lines) - 1)):
        shorter = replace(program, lines=program.lines[:place] + program.lines[place + 1 :])
        if runs(shorter) and fails(shorter):
            program = shorter
    return program


def runs(program: Program) -> bool:
    these = worlds([program])
    try:
        for step in range(STEPS):
            run_eager(these, step)
    except (RuntimeError, IndexError, NameError):
        return False
    return True
