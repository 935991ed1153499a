"""schedule_streams: independent branches side by side, where that is measured to be faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.fx import Graph, GraphModule, Node

from graft.ir.nodes import leaves, val
from graft.ir.streams import has_streams
from graft.ir.verify import GraphSnapshot
from graft.memory.stream_hazards import check_streams
from graft.ops.streams import SWITCH
from graft.passes.base import BaseTransform, Context, Outcome, TransformConfig
from graft.passes.costs import Costs, load_costs
from graft.passes.library.streams.emit import apply_schedule
from graft.passes.library.streams.schedule import Schedule, list_schedule
from graft.passes.registry import TransformRegistry
from graft.passes.report import MatchRecord


@dataclass(frozen=True)
class StreamsConfig(TransformConfig):
    streams: int = 2
    threshold: float = 0.03  # the share of the time that must be saved, as predicted
    measured: float = 0.01  # … and as measured inside a CUDA graph
    profile: str = ""  # a file of measured costs; without one they are measured now
    force: bool = False  # take the schedule whatever it saves, also on a CPU: to look at it and to test it


@TransformRegistry.register("schedule_streams")
class ScheduleStreams(BaseTransform):
    """Branches that do not need each other run on streams of their own.

    before:  %h = norm(%x);  %a = attention(%h);  %m = mlp(%h);  %y = add(%a, %m)
    after:   %h = norm(%x);  stream_record(1);  %a = attention(%h)
             stream_switch(1);  stream_wait(1);  %m = mlp(%h);  stream_record(2)
             stream_switch(0);  stream_wait(2);  stream_keep([%h]);  %y = add(%a, %m)

    Costs are measured, not guessed: every kind of call on real inputs. The schedule is taken where the prediction
    saves `threshold` or more and the whole graph, captured with and without it, is faster by `measured`. Otherwise
    the graph stays as it is and the reason has the numbers. `check_streams` proves every order that matters; what it
    cannot prove is rolled back. The last transform: others do not look for stream ops.

    Numerics: bitwise; the same calls on the same operands, in an order that nobody can tell from the old one.

    A walk, and no Rewriter: it has no sites that fit or not. One schedule of the whole graph is taken or left, as it
    is measured.
    """

    config: StreamsConfig  # pyrefly: ignore[bad-override-mutable-attribute]
    uncheckable = (
        "the calls and their operands stay the same; that nobody sees another order is proven by check_streams"
    )

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return StreamsConfig

    def apply(self, gm: GraphModule, context: Context) -> Outcome:
        problem = self.problem(gm, context)
        if problem is not None:
            return Outcome(reason=problem, skipped=True)
        schedule = list_schedule(gm.graph, self.costs(gm, context), self.config.streams)
        problem = None if self.config.force else self.loss(schedule)
        if schedule.streams < 2:
            problem = no_branches(schedule)
        if problem is not None:
            return Outcome(reason=problem)
        before, one_us = GraphSnapshot.take(gm), self.whole(gm, context)
        made = apply_schedule(gm, schedule, self.name)
        check_streams(gm.graph)
        many_us = self.whole(gm, context)
        if one_us is not None and many_us is not None and many_us > one_us * (1 - self.config.measured):
            before.restore(gm)
            return Outcome(reason=f"not taken: measured {numbers(one_us, many_us)}; predicted {predicted(schedule)}")
        context.outputs["stream_schedule"] = schedule
        context.outputs["stream_times"] = (one_us, many_us)
        times = f"measured {numbers(one_us, many_us)}; " if one_us is not None and many_us is not None else "forced; "
        return Outcome(records(gm, made), reason=f"taken: {times}predicted {predicted(schedule)}")

    def problem(self, gm: GraphModule, context: Context) -> str | None:
        """Why there is nothing to do, before anything is measured."""
        if self.config.streams < 2:
            return f"streams is {self.config.streams}; two or more can overlap"
        if has_streams(gm.graph):
            return "the graph has stream ops already"
        if not on_gpu(gm.graph) and not self.config.force:
            return "the graph is on no GPU, so nothing could overlap; force=true writes the schedule all the same"
        if context.measure is None and not self.config.profile:
            return "no costs: nobody measures here, and `profile` names no file"
        if context.measure is None and not self.config.force:
            return "nobody measures the whole graph here, and a prediction alone is not taken; force=true takes it"
        return None

    def costs(self, gm: GraphModule, context: Context) -> Costs:
        if self.config.profile:
            return load_costs(Path(self.config.profile), gm.graph)
        assert context.measure is not None  # `problem` has seen to it
        return context.measure.costs(gm)

    def whole(self, gm: GraphModule, context: Context) -> float | None:
        forced = self.config.force or context.measure is None
        return None if forced else context.measure.whole(gm)  # pyrefly: ignore[missing-attribute]

    def loss(self, schedule: Schedule) -> str | None:
        if schedule.gain >= self.config.threshold:
            return None
        if schedule.streams < 2:
            return no_branches(schedule)
        return f"not taken: predicted {predicted(schedule)}, less than {self.config.threshold:.1%}"


def on_gpu(graph: Graph) -> bool:
    return any(isinstance(item, torch.Tensor) and item.is_cuda for node in graph.nodes for item in leaves(val(node)))


def no_branches(schedule: Schedule) -> str:
    """One stream is as good as several: the graph is a chain, or its branches are shorter than an event."""
    one, path = schedule.one_us, schedule.path_us
    if path >= one * (1 - 1e-9):
        return f"no parallel branches: the longest path is all of it, {one:.1f} µs"
    return f"no branch is worth an event: {one:.1f} µs on one stream, {path:.1f} µs on the longest path"


def predicted(schedule: Schedule) -> str:
    times = numbers(schedule.one_us, schedule.many_us)
    return f"{times} (longest path {schedule.path_us:.1f} µs, {schedule.streams} streams)"


def numbers(one_us: float, many_us: float) -> str:
    return f"{one_us:.1f} µs on one stream, {many_us:.1f} µs on several ({1 - many_us / one_us:+.1%})"


def records(gm: GraphModule, made: Sequence[Node]) -> tuple[MatchRecord, ...]:
    """One for each stretch on a side stream: from its switch to the next."""
    found: list[tuple[Node, list[str]]] = []
    current, inside = 0, set(made)
    for node in gm.graph.nodes:
        if node not in inside:
            continue
        if node.target is SWITCH:
            current = node.args[0]
            if current:
                found.append((node, []))
        if found:
            found[-1][1].append(node.name)
    first = [node.name for node in gm.graph.nodes if node in inside and found and node < found[0][0]]
    return tuple(
        MatchRecord.at(node, (), (*(first if index == 0 else ()), *names))
        for index, (node, names) in enumerate(found)
    )
