"""Whether one compiled graph serves every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graft.api.compiled import CompiledModule
from graft.backends.inductor import compiled_graphs, refuse_recompiles, reset_compiler
from graft.base.errors import Recompiled
from graft.testing.failure import failure

NOTHING = "graft stages ask breaks says why it runs uncompiled; compile it after the reset that this helper makes"
ADVICE = (
    "free the size that varies (dynamic=True, torch._dynamo.mark_dynamic, dynamic_shapes), keep numbers that vary in"
    " tensors, or pass allowed=N if these compilations are meant"
)


def assert_no_recompiles(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    *,
    allowed: int = 1,
    dynamic: bool | None = None,
    backend: Any = "eager",
) -> None:
    """The first `allowed` of `calls` (tuples of arguments) may compile; none of the later ones does.

    function: of graft.compile, of torch.compile, or any other, which is then compiled by torch.compile with `backend`
    (which graphs there are is decided before a backend sees them). Run without gradients.
    """
    __tracebackhide__ = True
    if len(calls) <= allowed:
        raise ValueError(
            f"{len(calls)} calls, {allowed} of which may compile, leave nothing to check; pass more calls"
        )
    with torch.no_grad():
        problem = variants(function, calls, allowed) if isinstance(function, CompiledModule) else None
        if not isinstance(function, CompiledModule):
            reset_compiler()
            try:
                compiled = (
                    function if is_compiled(function) else torch.compile(function, backend=backend, dynamic=dynamic)
                )
                problem = recompiled(compiled, calls, allowed)
            finally:
                reset_compiler()
    if problem is not None:
        index, why = problem
        raise failure(
            f"all calls after the first {allowed} run what is compiled already",
            f"call {index + 1} with {shapes(calls[index])} compiled again",
            why,
            advice=ADVICE,
        )


def is_compiled(function: Callable[..., Any]) -> bool:
    return hasattr(function, "_torchdynamo_orig_callable") or hasattr(function, "_orig_mod")


def recompiled(
    function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], allowed: int
) -> tuple[int, list[str]] | None:
    """The first call after those allowed that compiles, and Dynamo's reasons. A frame that was never called before,
    as of another function behind a graph break, is compiled anew without being compiled again."""
    started = compiled_graphs()
    for index, args in enumerate(calls):
        if index < allowed:
            function(*args)
            continue
        before = compiled_graphs()
        if before == started:
            raise failure("something is compiled", "Dynamo made no graph in the calls that may", advice=NOTHING)
        try:
            with refuse_recompiles():
                function(*args)
        except Recompiled as error:
            return index, [line.strip() for line in str(error).splitlines() if line.strip()]
        if (new := compiled_graphs() - before) > 0:
            return index, [
                f"{new} more graph{'s were' if new > 1 else ' was'} made, of code that no call before came to"
            ]
    return None


def variants(
    compiled: CompiledModule, calls: Sequence[tuple[Any, ...]], allowed: int
) -> tuple[int, list[str]] | None:
    """The first call after those allowed for which graft captured, or recorded, another graph, and why."""
    for index, args in enumerate(calls):
        before, notes = graphs(compiled), set(compiled.report.notes)
        compiled(*args)
        if index >= allowed and graphs(compiled) > before:
            new = [note for note in compiled.report.notes if note not in notes]
            return index, new or (list(compiled.replays.events)[-1:] if compiled.replays else [])
    return None


def graphs(compiled: CompiledModule) -> int:
    return len(compiled.variants) + (compiled.replays.count if compiled.replays else 0)


def shapes(args: tuple[Any, ...]) -> str:
    return ", ".join(f"{a.dtype} {list(a.shape)}" if isinstance(a, torch.Tensor) else repr(a) for a in args)
