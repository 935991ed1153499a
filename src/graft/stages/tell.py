"""The story of a function: compiled for its calls with every stage watched, then once more out of the cache."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch.utils import _pytree as pytree

from graft.api.torch_compile import Backend
from graft.backends.inductor import reset_compiler, trust_instruction_sets
from graft.backends.inductor_caches import only_new_artifacts, save_cache_artifacts
from graft.base.files import folder_bytes
from graft.passes.report import Report
from graft.stages.caches import own_caches
from graft.stages.ends import ended, first_line
from graft.stages.functional import trace_whole
from graft.stages.kernel_times import measure_graphs
from graft.stages.kernels import SeenKernels, watch_kernels
from graft.stages.needs import missing
from graft.stages.runtime import NEEDS as RUNTIME
from graft.stages.runtime import RunnableGraph, watch_graphs
from graft.stages.story import STAGES, FreshProcess, Story, StoryEnd
from graft.stages.trace import NEEDS as TRACE
from graft.stages.trace import tracing_rows
from graft.stages.watch import StageWatch, missing_names, watching

BackendName = Literal["inductor", "graft", "eager"]
Elsewhere = Callable[
    [bytes, Callable[..., Any], tuple[Any, ...], Any], FreshProcess
]  # artifacts, first call, its result


class Keeper(Protocol):
    """Is given what is known, step by step: what is left of a run whose process is killed. folder: for files of the
    run itself."""

    folder: Path

    def at(self, stage: int, doing: str) -> None: ...

    def story(self, story: Any) -> None: ...


def tell_story(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    *,
    target: str = "",
    backend: BackendName = "inductor",
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    gradients: bool = False,
    whole: bool = True,
    values: bool = False,
    elsewhere: Elsewhere | None = None,
    keeper: Keeper | None = None,
) -> Story:
    """Compiles `function` and makes each of `calls`, on copies of their arguments.

    backend: eager shows stage 1 alone, in a fraction of the time. whole: also the graph before ops are taken apart
    (one more trace), and the first call once more out of the cache, with each kernel of it timed alone. values: also
    what every launch of that call wrote. elsewhere: makes the first call in a fresh process with the artifacts.
    keeper: is given the story so far before the program or generated code goes on.
    """
    trust_instruction_sets()
    made = story_backend(backend)
    settings = compile_settings(made, dynamic, mode, options)
    named = [by_name(function, args) for args in calls]
    name, device = target or getattr(function, "__name__", type(function).__name__), device_of(function, calls)
    if problem := missing(TRACE):  # without the trace there is nothing to tell
        nothing = StoryEnd(0, "looking for torch's structured trace", problem)
        return Story(name, backend, torch.__version__, device, end=nothing)
    end: StoryEnd | None = None
    reset_compiler()
    try:
        inside = keeper.folder if keeper is not None else None
        with own_caches(inside) as home, grad_mode(gradients), only_new_artifacts(), asked_of_dynamo(options):
            with watching(home) as watch:

                def so_far() -> Story:
                    reports = reports_of(made)
                    return with_problems(
                        watch.story(name, backend=backend, device=device, calls=named, reports=reports)
                    )

                if keeper is not None:
                    watch.reached.told = keeping(keeper, watch, so_far)
                end = make_calls(watch, function, calls, settings, keep=elsewhere is not None)
            reports = reports_of(made)
            content = save_cache_artifacts() if elsewhere is not None and end is None and backend != "eager" else None
            if whole and end is None and backend != "eager":
                more_of_it(watch, function, calls[0], settings, dynamic, values)
            if elsewhere is not None and content is not None:
                watch.fresh = elsewhere(content, function, calls[0], watch.result)
            story = watch.story(name, backend=backend, device=device, calls=named, reports=reports, end=end)
    finally:
        reset_compiler()
    return with_problems(story)


def reports_of(backend: Backend | str) -> tuple[Report, ...]:
    return tuple(backend.reports) if isinstance(backend, Backend) else ()


def keeping(keeper: Keeper, watch: StageWatch, so_far: Callable[[], Story]) -> Callable[[int, str], None]:
    """Hands on every step, and the story where something was compiled since and what may end the process follows."""
    known = -1

    def told(stage: int, doing: str) -> None:
        nonlocal known
        keeper.at(stage, doing)
        if stage in (0, 6) and doing.startswith("running") and len(watch.trace.rows) != known:
            known = len(watch.trace.rows)
            keeper.story(so_far())

    told(watch.reached.stage, watch.reached.doing)
    keeper.story(so_far())
    return told


def story_backend(name: str) -> Backend | str:
    return Backend() if name == "graft" else name


def compile_settings(
    backend: Any, dynamic: bool | None, mode: str | None, options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """torch.compile takes a mode or options; with both, the mode's options lie under the others."""
    given = dict(options or {})
    if mode and given:
        given = {**torch._inductor.list_mode_options(mode), **given}
    settings: dict[str, Any] = {"backend": backend, "dynamic": dynamic}
    return {**settings, **({"options": given} if given else {"mode": mode} if mode else {})}


def asked_of_dynamo(options: Mapping[str, Any] | None) -> AbstractContextManager[Any]:
    """Dynamo asks whether weights are to be frozen, and sees no options of a call."""
    frozen = {name: value for name, value in (options or {}).items() if name == "freezing"}
    return torch._inductor.config.patch(frozen) if frozen else nullcontext()


def grad_mode(gradients: bool) -> AbstractContextManager[Any]:
    return nullcontext() if gradients else torch.no_grad()


def make_calls(
    watch: StageWatch,
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    settings: Mapping[str, Any],
    *,
    keep: bool = False,
) -> StoryEnd | None:
    """Where and why it ended before the last call, or None. keep: the result of the first, for a comparison."""
    compiled = torch.compile(function, **settings)
    started = time.perf_counter()
    for index, args in enumerate(calls):
        watch.reached.call = index + 1
        watch.reached.at(0, f"running call {index + 1}")
        try:
            result = compiled(*copies(args, watch.notes))
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a program raises ends its story, told there
            return ended(watch, error, index)
        if inspect.isgenerator(result) or inspect.iscoroutine(result):
            kind = type(result).__name__
            watch.notes.append(f"the function returns a {kind}, whose body nothing runs: tell of what it is made of")
            result.close()
        if index == 0:
            watch.seconds = (time.perf_counter() - started, 0.0)
            watch.result = detached(result) if keep else None
        del result  # a CUDA graph's next replay takes its memory
    return recorded_calls(watch, compiled, calls)


def recorded_calls(
    watch: StageWatch, compiled: Callable[..., Any], calls: Sequence[tuple[Any, ...]]
) -> StoryEnd | None:
    """The calls once more while a CUDA graph is still to be recorded, which the second call of its graph does."""
    for index, args in enumerate(calls):
        if not watch.runtime.pending():
            return None
        watch.reached.call = index + 1
        watch.reached.at(0, f"running call {index + 1} again, for its CUDA graph")
        try:
            compiled(*copies(args, watch.notes))
        except (Exception, SystemExit) as error:  # noqa: BLE001  as in the first calls
            return ended(watch, error, index)
    return None


def copies(args: tuple[Any, ...], notes: list[str]) -> tuple[Any, ...]:
    """Memory that arguments share stays shared. What cannot be copied (a lock, an open file) is given as it is, which
    goes to `notes`."""
    memo: dict[int, Any] = {}
    return tuple(copied(value, memo, notes) for value in args)


def copied(value: Any, memo: dict[int, Any], notes: list[str]) -> Any:
    if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
        value = value.detach().requires_grad_()  # what made it is no part of the program
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:  # noqa: BLE001  whatever a class of the program raises when it is copied
        notes.append(f"an argument of type {type(value).__name__} is shared by all calls: {first_line(error)}")
        return value


def detached(result: Any) -> Any:
    """Copies of its tensors on the CPU: those of a CUDA graph change with the next replay. One of the device meta has
    nothing to copy."""

    def copied(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        return one.detach() if one.is_meta else one.detach().cpu().clone()

    return pytree.tree_map(copied, result)


def more_of_it(
    watch: StageWatch,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    settings: Mapping[str, Any],
    dynamic: bool | None,
    values: bool,
) -> None:
    """The first call again after everything in memory was forgotten, times of its kernels, the graph with whole ops.
    All are extras: the story has what came before them, and a note of what failed."""
    watch.kept_bytes = folder_bytes(watch.home)
    reset_compiler()
    graphs: list[RunnableGraph] = []

    def call_again() -> None:
        kept = nullcontext() if missing(RUNTIME) else watch_graphs(graphs)
        with tracing_rows() as again, watch_kernels(SeenKernels()), kept:  # its setting is part of the cache's keys
            started = time.perf_counter()
            torch.compile(function, **settings)(*copies(args, watch.notes))
            watch.seconds = (watch.seconds[0], time.perf_counter() - started)
            watch.again = again

    def time_kernels() -> None:
        if watch.again is not None:
            watch.measured, watch.values = measure_graphs(graphs, watch.again, values=values)

    def trace_again() -> None:
        trace_whole(watch.functional, function, copies(args, watch.notes), dynamic)

    parts = {"calling it once more": call_again, "timing kernels": time_kernels, "tracing whole ops": trace_again}
    for what, part in parts.items():
        try:
            part()
        except Exception as error:  # noqa: BLE001  whatever a program raises the second time
            watch.notes.append(f"{what} failed: {first_line(error)}")


def by_name(function: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments by the names of the parameters."""
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        return dict(inspect.signature(called).bind(*args).arguments)
    except (TypeError, ValueError):
        return {f"argument {index}": value for index, value in enumerate(args)}


def device_of(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> str:
    tensors = [value for value in pytree.tree_leaves(list(calls)) if isinstance(value, torch.Tensor)]
    tensors += list(function.parameters())[:1] if isinstance(function, torch.nn.Module) else []
    return str(tensors[0].device) if tensors else "cpu"


def with_problems(story: Story) -> Story:
    """Stages that could not be watched, or that the run did not come to, say why they are empty."""
    changes: dict[str, Any] = {}
    for name, problem in missing_names().items():
        changes[name] = replace(getattr(story, name), problem=problem)
    if story.backend == "eager":
        for name in STAGES[1:]:
            changes.setdefault(
                name, replace(getattr(story, name), problem="backend eager: Dynamo's graph runs as it is")
            )
    if not story.dynamo.graphs and "dynamo" not in changes:
        changes["dynamo"] = replace(story.dynamo, problem="nothing was compiled: Dynamo gave no graph to the backend")
        for name in STAGES[1:]:  # of what is not there nothing is known: neither copies nor keys
            changes.setdefault(name, replace(getattr(story, name), problem="nothing was compiled"))
    return replace(story, **changes)
