"""What the stages of torch.compile did to a function, as assertions. Each compiles it anew, for one call.

    assert_fused_together(attention, (q, k), "model.py:12", "model.py:13")

A place is a line (`model.py:12`, `:12`) or a node of a graph (`%mul_3`), as in `graft stages why`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graft.base.errors import UsageError
from graft.stages.breaks import UNCOMPILED
from graft.stages.follow import Trail, follow
from graft.stages.story import Story
from graft.stages.story_code import AutotuneRecord
from graft.stages.tell import BackendName, tell_story
from graft.testing.failure import failure

AUTOTUNE = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,TRITON,ATEN", "freezing": True}


def story_for(
    function: Callable[..., Any], args: tuple[Any, ...], *, backend: BackendName = "inductor",
    dynamic: bool | None = None, mode: str | None = None, options: Mapping[str, Any] | None = None,
    needed: Sequence[str] = (),
) -> Story:  # fmt: skip
    """Of one call; a call that fails is a failure that says where, and so is one of which nothing is compiled, or a
    stage (`needed`) that cannot be watched with this torch: what is not seen would hold of itself."""
    __tracebackhide__ = True
    story = tell_story(function, [args], backend=backend, dynamic=dynamic, mode=mode, options=options, whole=False)
    unseen = {getattr(story, name).problem for name in ("dynamo", *needed) if getattr(story, name).problem}
    breaks = [f"{one.line}: {one.reason}" for one in story.dynamo.breaks]
    if needed and any(one.endswith(UNCOMPILED) for one in breaks):  # a function that it calls; graphs there may be
        unseen.add("part of it runs uncompiled")
    if unseen and story.end is None:
        raise failure(
            f"{story.target} is compiled, and seen",
            "; ".join(unseen),
            breaks,
            advice="of what is not there nothing holds",
        )
    if story.end is not None:
        where = f"stage {story.end.stage}, {story.end.doing}" if story.end.stage else story.end.doing
        raise failure(f"{story.target} compiles and runs", f"{where}: {story.end.error}", advice="correct that first")
    return story


def assert_no_graph_breaks(function: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> None:
    """Dynamo makes one graph of it."""
    __tracebackhide__ = True
    story = story_for(function, args, backend="eager", dynamic=dynamic)
    if story.dynamo.breaks or len(story.dynamo.graphs) != 1:
        breaks = [f"{one.line}: {one.explanation or one.reason}" for one in story.dynamo.breaks]
        raise failure(
            "one graph",
            f"{len(story.dynamo.graphs)} graphs, {len(breaks)} breaks",
            breaks or [story.dynamo.problem],
            advice="take what breaks out of the function, or call it before and after",
        )


def assert_kernel_count(
    function: Callable[..., Any],
    *args: Any,
    count: int,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
) -> None:
    """Inductor's own code launches so many kernels; matmuls and ops that it calls beside them do not count."""
    __tracebackhide__ = True
    story = story_for(function, args, options=options, dynamic=dynamic, needed=("kernels",))
    kernels = [kernel for kernel in story.kernels.kernels if kernel.source]
    launches = sum(kernel.launches for kernel in kernels)
    if launches != count:
        lines = [f"{k.name}, {k.launches} launches: {', '.join(k.lines)}" for k in kernels]
        why = [f"{r.first} and {r.second} not fused: {r.reason}" for r in story.scheduling.refusals]
        raise failure(
            f"{count} kernels launched", f"{launches}", lines + why, advice="read why nodes were not fused, below"
        )


def assert_fused_together(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *places: str,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
) -> None:
    """Some launch of a kernel computes something of each place. Calls (a matmul) are no kernels of Inductor's."""
    __tracebackhide__ = True
    if len(places) < 2:
        raise ValueError("one place is always together with itself; name two or more")
    story = story_for(function, args, options=options, dynamic=dynamic, needed=("post_grad", "kernels"))
    found = [trails_of(story, place) for place in places]
    shared = set.intersection(*(launches_with(story, trails) for trails in found))
    if not shared:
        lines = [f"{place}: {', '.join(n for t in trails for n in t.kernels) or trails[0].gone}"
                 for place, trails in zip(places, found, strict=True)]  # fmt: skip
        why = [f"{r.first} and {r.second} not fused: {r.reason}" for r in story.scheduling.refusals]
        raise failure(
            f"one kernel for {' and '.join(places)}",
            "no kernel has them all",
            [*lines, *why],
            advice="graft stages ask fusion says why two nodes are apart",
        )


def trails_of(story: Story, place: str) -> tuple[Trail, ...]:
    __tracebackhide__ = True
    try:
        return follow(story, place)
    except UsageError as error:
        raise failure(f"{story.target} has {place}", str(error), advice="name a line or a node that it has") from None


def launches_with(story: Story, trails: Sequence[Trail]) -> set[tuple[str, str, int]]:
    """Graph, kernel and number of each launch of generated code that computes some of it: equal layers launch one
    kernel several times, for different nodes."""
    return {
        (kernel.graph, kernel.name, number)
        for trail in trails
        for kernel in story.kernels.kernels
        if kernel.graph == trail.graph and kernel.source
        for number, nodes in enumerate(kernel.by_launch or (kernel.nodes,))
        if set(nodes) & set(trail.post_grad)
    }


def assert_no_copies(
    function: Callable[..., Any],
    *args: Any,
    allowed_bytes: int = 0,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
) -> None:
    """Nothing is copied whole: no clone is left, no result is copied into an input, no layout is changed for a call.

    allowed_bytes: copies that are meant. Sizes that are symbols count as more than any number.
    """
    __tracebackhide__ = True
    needed = ("functional", "post_grad", "scheduling")
    copies = story_for(function, args, options=options, dynamic=dynamic, needed=needed).scheduling.copies
    sizes = [one.bytes if isinstance(one.bytes, int) else float("inf") for one in copies]
    if sum(sizes) > allowed_bytes:
        raise failure(
            f"at most {allowed_bytes:,} bytes copied",
            f"{sum(sizes):,} bytes in {len(copies)} copies",
            [f"%{one.node} {one.line}: {one.bytes} bytes: {one.reason}" for one in copies],
            advice="write in place, read before the write, or allow what is meant (allowed_bytes)",
        )


def assert_cudagraphed(function: Callable[..., Any], *args: Any, mode: str = "reduce-overhead") -> None:
    """Every graph of it is recorded as a CUDA graph."""
    __tracebackhide__ = True
    records = story_for(function, args, mode=mode).runtime.cudagraphs
    skipped = [f"{one.graph}: {one.reason}" for one in records if not one.recorded]
    if skipped or not records:
        raise failure(
            "every graph recorded as a CUDA graph",
            f"{len(skipped)} of {len(records)} skipped",
            skipped,
            advice="take the reason away (writes to inputs, work on the CPU, dynamic sizes), or split the function",
        )


def autotune_choices(
    function: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None
) -> Sequence[AutotuneRecord]:
    """What autotuning measured for each matmul, the fastest choice first. Weights are frozen: on a CPU, templates are
    for constant weights alone. Nothing measured is a failure."""
    __tracebackhide__ = True
    with torch._inductor.config.patch({**AUTOTUNE, **(options or {})}):  # Dynamo asks for `freezing`, too
        story = story_for(function, args, needed=("kernels",))
    if not story.kernels.choices:
        called = [f"{kernel.name} of {', '.join(kernel.lines)}" for kernel in story.kernels.kernels]
        raise failure(
            "choices that were timed", "autotuning had nothing to choose", called,
            advice="call it with a matmul whose weight is a parameter, and with sizes that a template takes",
        )  # fmt: skip
    return story.kernels.choices
