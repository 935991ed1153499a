"""All adapters at once around whatever compiles, and the story of what they saw. Outside of it nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from graft.passes.report import Report
from graft.stages import (
    autotune,
    caches,
    cudagraphs,
    dynamo,
    functional,
    guards,
    kernel_times,
    kernels,
    post_grad,
    recompiles,
    runtime,
    scheduling,
    trace,
)
from graft.stages.needs import Reached, missing, version_note
from graft.stages.recompiles import value_text
from graft.stages.story import STAGES, CopyRecord, FreshProcess, Story, StoryEnd
from graft.stages.story_code import ValueRecord

ADAPTERS = {
    "dynamo": dynamo.NEEDS,
    "functional": functional.NEEDS,
    "post_grad": post_grad.NEEDS,
    "scheduling": scheduling.NEEDS,
    "kernels": kernels.NEEDS,
    "autotune": autotune.NEEDS,
    "runtime": runtime.NEEDS,
    "cudagraphs": cudagraphs.NEEDS,
    "caches": caches.NEEDS,
    "guards": guards.NEEDS,
    "recompiles": recompiles.NEEDS,
    "trace": trace.NEEDS,
}


@dataclass
class StageWatch:
    """What the adapters have seen so far."""

    trace: trace.TraceCollector
    home: Path
    reached: Reached = field(default_factory=Reached)
    dynamo: dynamo.SeenDynamo = field(default_factory=dynamo.SeenDynamo)
    functional: functional.SeenFunctional = field(default_factory=functional.SeenFunctional)
    post_grad: post_grad.SeenPostGrad = field(default_factory=post_grad.SeenPostGrad)
    scheduling: scheduling.SeenScheduling = field(default_factory=scheduling.SeenScheduling)
    kernels: kernels.SeenKernels = field(default_factory=kernels.SeenKernels)
    choices: autotune.SeenChoices = field(default_factory=autotune.SeenChoices)
    runtime: cudagraphs.SeenCudagraphs = field(default_factory=cudagraphs.SeenCudagraphs)
    again: trace.TraceCollector | None = None
    seconds: tuple[float, float] = (0.0, 0.0)
    kept_bytes: int = 0
    result: Any = None  # of the first call, where it is to be compared
    fresh: FreshProcess | None = None
    measured: Mapping[tuple[str, str], kernel_times.MeasuredKernel] = field(default_factory=dict)
    values: tuple[ValueRecord, ...] = ()
    notes: list[str] = field(default_factory=list)

    def story(
        self, target: str, *, backend: str = "inductor", device: str = "cpu", calls: Sequence[Mapping[str, Any]] = (),
        reports: Sequence[Report] = (), end: StoryEnd | None = None,
    ) -> Story:  # fmt: skip
        """calls: the arguments of each call by name."""
        last = self.post_grad.last
        ends = {
            number: functional.fates(graph, scheduling.fused_with(self.scheduling.nodes, number))
            for number, graph in last.items()
        }
        writes = [
            CopyRecord(number, fate.node, fate.line, fate.copied, f"%{written} is written at the end: {fate.text}")
            for number, found in ends.items()
            for written, fate in found.items()
            if fate.copied
        ]
        code = kernels.kernel_stage(
            self.kernels, self.choices, self.trace, self.post_grad.graphs, device, self.measured
        )
        by_node = kernels.kernel_by_node(code)
        return Story(
            target=target, backend=backend, torch=torch.__version__, device=device,
            calls=tuple(call_text(call) for call in calls), seconds=self.seconds[0], end=end,
            notes=tuple(dict.fromkeys(filter(None, (version_note(), *self.notes)))),
            dynamo=dynamo.dynamo_stage(self.dynamo, self.trace),
            functional=functional.functional_stage(self.functional, ends, last),
            post_grad=post_grad.post_grad_stage(self.post_grad, reports),
            scheduling=scheduling.scheduling_stage(self.scheduling, last, writes, by_node, self.functional.graphs),
            kernels=code,
            runtime=runtime.runtime_stage(self.runtime, self.trace, self.values, len(self.dynamo.streams)),
            caches=caches.cache_stage(self.trace, self.again, self.seconds, self.kept_bytes, self.fresh),
        )  # fmt: skip


@contextmanager
def watching(home: Path | None = None) -> Iterator[StageWatch]:
    """home: the folder of `own_caches`; left out, caches are kept apart here. An adapter whose names this torch lacks
    stays out, and its stage says so."""
    with ExitStack() as stack:
        kept = home if home is not None else stack.enter_context(caches.own_caches())
        watch = StageWatch(stack.enter_context(trace.tracing_rows()), kept)
        reached = watch.reached
        contexts: dict[str, AbstractContextManager[None]] = {
            "dynamo": dynamo.watch_dynamo(watch.dynamo, reached),
            "functional": functional.watch_functional(watch.functional, reached),
            "post_grad": post_grad.watch_post_grad(watch.post_grad, reached),
            "scheduling": scheduling.watch_scheduling(watch.scheduling, reached),
            "kernels": kernels.watch_kernels(watch.kernels),
            "autotune": autotune.watch_autotuning(watch.choices, reached),
            "runtime": runtime.watch_runtime(watch.runtime, reached),
        }
        for name, context in contexts.items():
            if not missing(ADAPTERS[name]):
                stack.enter_context(context)
        yield watch


def missing_names() -> dict[str, str]:
    """For each stage whose adapter cannot work here, why."""
    return {name: problem for name in STAGES if (problem := missing(ADAPTERS[name]))}


def call_text(call: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value_text(value)}" for name, value in call.items())
