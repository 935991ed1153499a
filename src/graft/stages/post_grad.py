"""Stage 3, graph passes: each with what it took out and put in, pattern matches, and the graph in the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch._inductor.compile_fx
import torch._inductor.pattern_matcher
from torch.fx import Graph, GraphModule
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from graft.ir.io.text import target_text
from graft.ir.nodes import calls, source_line
from graft.passes.report import Report
from graft.stages.graphs import record_graph
from graft.stages.needs import Reached, swapped
from graft.stages.story import FusionRun, PassRun, PostGradStage, StageGraph
from graft.stages.trace import current_graph

NEEDS = (
    "torch._inductor.compile_fx:_recursive_post_grad_passes",
    "torch._inductor.pattern_matcher:PatternMatcherPass.apply",
    "torch._inductor.pattern_matcher:LoweringPatternEntry.apply",
    "torch._inductor.pattern_matcher:GraphPatternEntry.apply",
    "torch._inductor.pattern_matcher:ReplacementPatternEntry.apply",
    "torch.fx.passes.graph_transform_observer:GraphTransformObserver.apply_graph_pass",
    "torch.fx.passes.graph_transform_observer:GraphTransformObserver.apply_gm_pass",
)
FOLDING = "constant_fold_uniform_value"


@dataclass
class SeenPostGrad:
    """last: the graph objects after the passes, by compilation; later stages read them."""

    graphs: list[StageGraph] = field(default_factory=list)
    passes: list[PassRun] = field(default_factory=list)
    last: dict[str, Graph] = field(default_factory=dict)
    applied: list[str] = field(default_factory=list)  # patterns, by name, one after the other
    lines: dict[tuple[str, str], str] = field(default_factory=dict)  # of nodes that a pass put in another's place


@contextmanager
def watch_post_grad(seen: SeenPostGrad, reached: Reached) -> Iterator[None]:
    def make_post_grad(before: Callable[..., Any]) -> Callable[..., Any]:
        def post_grad_passes(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
            number = current_graph()
            reached.at(3, f"post-grad passes on graph {number}")
            result = before(gm, *args, **kwargs)
            seen.graphs = [one for one in seen.graphs if one.graph != number]  # the outermost graph ends last
            seen.graphs.append(with_lines(record_graph(gm.graph, number), seen.lines))
            seen.last[number] = gm.graph
            reached.at(4, f"lowering graph {number} to Inductor's IR")
            return result

        return post_grad_passes

    def make_pass(before: Callable[..., Any]) -> Callable[..., Any]:
        def apply(self: GraphTransformObserver, run: Any) -> Any:
            name, subsystem = self.passname, self.subsystem or ""
            reached.at(3, f"pass {name} on graph {current_graph()}")
            counted, started = count_calls(self.gm.graph), time.perf_counter()
            folded = places(self.gm.graph) if name == FOLDING else {}
            result = before(self, run)
            seen.lines |= moved_lines(self.gm.graph, folded)
            ms, after = (time.perf_counter() - started) * 1e3, count_calls(self.gm.graph)
            seen.passes.append(
                PassRun(current_graph(), subsystem, name, ms, dict(counted - after), dict(after - counted))
            )
            return result

        return apply

    observer, matcher = GraphTransformObserver, torch._inductor.pattern_matcher
    with (
        swapped(torch._inductor.compile_fx, "_recursive_post_grad_passes", make_post_grad),
        swapped(observer, "apply_graph_pass", make_pass),
        swapped(observer, "apply_gm_pass", make_pass),
        swapped(matcher.PatternMatcherPass, "apply", lambda before: matching(before, seen)),
        swapped(matcher.LoweringPatternEntry, "apply", lambda before: naming(before, seen)),
        swapped(matcher.GraphPatternEntry, "apply", lambda before: naming(before, seen)),
        swapped(matcher.ReplacementPatternEntry, "apply", lambda before: naming(before, seen)),
    ):
        yield


def places(graph: Graph) -> dict[str, tuple[frozenset[str], str]]:
    """Of each node who reads it, and its line."""
    return {node.name: (frozenset(user.name for user in node.users), source_line(node)) for node in graph.nodes}


def moved_lines(graph: Graph, before: Mapping[str, tuple[frozenset[str], str]]) -> dict[tuple[str, str], str]:
    """What is read by all that read a node which is gone has its line. Folding gives constants that of a reader."""
    if not before:
        return {}
    after = places(graph)
    gone = {readers: line for name, (readers, line) in before.items() if name not in after and readers}
    new = {name: readers for name, (readers, _) in after.items() if name not in before}
    return {(current_graph(), name): gone[readers] for name, readers in new.items() if readers in gone}


def with_lines(graph: StageGraph, lines: Mapping[tuple[str, str], str]) -> StageGraph:
    nodes = [replace(one, line=lines.get((graph.graph, one.name), one.line)) for one in graph.nodes]
    return replace(graph, nodes=tuple(nodes))


def matching(before: Callable[..., Any], seen: SeenPostGrad) -> Callable[..., Any]:
    """A table of patterns: what it took out and put in, and how often each pattern of it matched."""

    def apply(self: Any, gm: GraphModule | Graph) -> int:
        graph = gm.graph if isinstance(gm, GraphModule) else gm
        counted, first = count_calls(graph), len(seen.applied)
        count = before(self, gm)
        if count:
            after, matched = count_calls(graph), dict(Counter(seen.applied[first:]))
            name = getattr(self, "pass_name", None) or "patterns"
            change = dict(counted - after), dict(after - counted)
            seen.passes.append(PassRun(current_graph(), "patterns", name, 0.0, *change, matched))
        return count

    return apply


def naming(before: Callable[..., Any], seen: SeenPostGrad) -> Callable[..., Any]:
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.applied.append(pattern_name(self))
        return before(self, *args, **kwargs)

    return apply


def pattern_name(entry: Any) -> str:
    """Its own (torch 2.13 has some), that of the function that replaces it, or the op that it ends in."""
    handler = getattr(entry, "handler", None)
    while isinstance(handler, partial):
        handler = handler.func
    named = getattr(entry, "pattern_name", None) or getattr(handler, "__name__", "<lambda>")
    if named != "<lambda>":
        return str(named)
    ends = getattr(entry.pattern, "fns", ())
    return f"a pattern of {target_text(ends[0])}" if ends else "a pattern"


def count_calls(graph: Graph) -> Counter[str]:
    return Counter(target_text(node.target) for node in calls(graph))


def post_grad_stage(seen: SeenPostGrad, reports: Sequence[Report]) -> PostGradStage:
    """reports: graft's, for the graphs of this run."""
    fusions = [
        FusionRun(
            report.model or "", record.name, record.status, len(record.matches),
            tuple(f"{miss.anchor}: {miss.reason}" for miss in record.near_misses), record.reason or "",
        )
        for report in reports
        for record in report.transforms.values()
        if record.status != "disabled"
    ]  # fmt: skip
    changed = [one for one in seen.passes if one.removed or one.added or one.matches or one.ms > 5]
    return PostGradStage(graphs=tuple(seen.graphs), passes=tuple(changed), fusions=tuple(fusions))
