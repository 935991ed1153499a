"""How long each kernel of a graph takes alone, and what a launch of it needs: registers, spills, shared memory, tile.

All kernels are timed in turn, several times over, so that a busy moment of the machine meets them all; what is told
is the median with the range of the readings.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from graft.base.timers import call_times
from graft.stages.autotune import config_text
from graft.stages.kernels import read_source
from graft.stages.launches import NotedLaunch, argument_text, launches_of
from graft.stages.runtime import RunnableGraph
from graft.stages.story_code import ValueRecord
from graft.stages.trace import TraceCollector

T = TypeVar("T")
IN_A_ROW, REPEATS, ROUNDS = 5, 7, 4
CHANGES = "a second call makes other whole numbers (a position, a random number), so it is not called again and again"


@dataclass(frozen=True)
class MeasuredKernel:
    """us: of one launch alone, its data in the cache, the median of its readings; 0 with a problem where it was not
    measured. us_range: of the readings without the lowest and the highest tenth."""

    us: float = 0.0
    problem: str = ""
    arguments: tuple[str, ...] = ()
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    tile: str = ""
    us_range: tuple[float, ...] = ()
    shapes: int = 1  # of arguments that it is launched with; us is that of one launch on average


def measure_graphs(
    graphs: Sequence[RunnableGraph], trace: TraceCollector, *, values: bool = False
) -> tuple[dict[tuple[str, str], MeasuredKernel], tuple[ValueRecord, ...]]:
    """For each kernel of each graph how long it takes; with `values`, also what every launch wrote."""
    by_shape: dict[tuple[str, str, tuple[str, ...]], list[NotedLaunch]] = {}
    written: list[ValueRecord] = []
    code = {row.graph: row.payload for row in trace.of("inductor_output_code")}
    for graph in graphs:
        sources = {one.name: one for one in read_source(code.get(graph.graph, ""))}
        launches = launches_of(graph, sources, values)
        written += [record for launch in launches for record in launch.values]
        for launch in launches:
            by_shape.setdefault((graph.graph, launch.name, arguments_of(launch)), []).append(launch)
    times = measure_launches({key: several[0] for key, several in by_shape.items()})
    kernels: dict[tuple[str, str], list[tuple[int, MeasuredKernel]]] = {}
    for key, one in times.items():
        kernels.setdefault(key[:2], []).append((len(by_shape[key]), one))
    return {key: averaged(shapes) for key, shapes in kernels.items()}, tuple(written)


def averaged(shapes: Sequence[tuple[int, MeasuredKernel]]) -> MeasuredKernel:
    """Of launches with other shapes, each with how often: the time of one on average, the rest of the first."""
    first = shapes[0][1]
    problems = [one.problem for _, one in shapes if one.problem]
    if len(shapes) == 1 or problems:
        return replace(first, problem="".join(problems[:1]), us=0.0 if problems else first.us, shapes=len(shapes))
    count = sum(times for times, _ in shapes)
    us = sum(times * one.us for times, one in shapes) / count
    ends = (sum(times * one.us_range[end] for times, one in shapes) / count for end in (0, 1))
    return replace(first, us=round(us, 3), us_range=tuple(round(end, 3) for end in ends), shapes=len(shapes))


def arguments_of(launch: NotedLaunch) -> tuple[str, ...]:
    named = [f"{key}={argument_text(value)}" for key, value in launch.kwargs.items() if key != "stream"]
    return (*map(argument_text, launch.args), *named)


def measure_launches(launches: Mapping[T, NotedLaunch]) -> dict[T, MeasuredKernel]:
    measured = {key: called_again(launch) for key, launch in launches.items()}
    times: dict[T, list[float]] = {key: [] for key, one in measured.items() if not one.problem}
    for _ in range(ROUNDS):
        for key in [key for key in times if not measured[key].problem]:
            try:
                times[key] += call_times(launches[key], device_of(launches[key]), REPEATS, in_a_row=IN_A_ROW)
            except Exception as error:  # noqa: BLE001  an op that no CUDA graph can hold is told as that
                measured[key] = replace(measured[key], problem=problem_text(error))
    for key in [key for key in times if not measured[key].problem]:
        us, us_range = middle(times[key])
        measured[key] = replace(measured[key], us=us, us_range=us_range)
    return measured


def middle(seconds: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Microseconds: the median, and what is left without the lowest and the highest tenth."""
    ordered, tenth = sorted(seconds), len(seconds) // 10
    found = (statistics.median(ordered), ordered[tenth], ordered[-1 - tenth])
    median, low, high = (round(1e6 * one, 3) for one in found)
    return median, (low, high)


def called_again(launch: NotedLaunch) -> MeasuredKernel:
    """Its arguments and resources, and why it cannot be called again and again."""
    found = MeasuredKernel(arguments=arguments_of(launch), **resources(launch.function))
    numbers = [
        (one, one.clone()) for one in tensors_of(launch) if not one.is_floating_point() and not one.is_complex()
    ]
    try:
        launch()
    except Exception as error:  # noqa: BLE001  an op that cannot be called once more by itself is told as that
        return replace(found, problem=problem_text(error))
    if all(torch.equal(one, before) for one, before in numbers):
        return found
    for one, before in numbers:
        one.copy_(before)
    return replace(found, problem=CHANGES)


def problem_text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]


def tensors_of(launch: NotedLaunch) -> list[torch.Tensor]:
    return [value for value in (*launch.args, *launch.kwargs.values()) if isinstance(value, torch.Tensor)]


def device_of(launch: NotedLaunch) -> torch.device:
    return next((one.device for one in tensors_of(launch)), torch.device("cpu"))


def resources(function: Any) -> dict[str, Any]:
    """Registers, spills, shared memory and tile of a Triton kernel that was launched; nothing for other kernels."""
    launchers = getattr(getattr(function, "__self__", None), "launchers", None)
    if not launchers:
        return {}
    chosen = launchers[0]
    return {
        "registers": getattr(chosen, "n_regs", None),
        "spills": getattr(chosen, "n_spills", None),
        "shared": getattr(chosen, "shared", None),
        "tile": config_text(chosen),
    }
