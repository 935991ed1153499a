"""Two stories: the first stage at which they differ, and what differs in each."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from graft.stages.follow import NO_CALLS
from graft.stages.story import STAGES, StageGraph, StageNode, Story
from graft.workbench.diff_text import StyledLine
from graft.workbench.stages.text import TITLES
from graft.workbench.stages.times import KernelTimes, diff_times, time_lines
from graft.workbench.stages.words import cut

NAME = re.compile(r"%(\w+)")


@dataclass(frozen=True)
class StageDiff:
    """Facts of one stage that one run has and the other has not, each with how often."""

    stage: int
    removed: tuple[tuple[str, int], ...]
    added: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class StoryDiff:
    before: str
    after: str
    stages: tuple[StageDiff, ...]
    times: tuple[KernelTimes, ...] = ()  # those that changed most come first
    ends: tuple[str, ...] = ()  # of runs that ended early: later stages are not theirs to differ in

    @property
    def first(self) -> int | None:
        return self.stages[0].stage if self.stages else None

    def to_dict(self) -> dict[str, Any]:
        return {"first": self.first, **asdict(self)}


def diff_stories(before: Story, after: Story) -> StoryDiff:
    found = []
    if before.torch != after.torch:
        before, after = without_keys(before), without_keys(after)
    for number, name in enumerate(STAGES, 1):
        left, right = Counter(FACTS[name](before)), Counter(FACTS[name](after))
        for finer in (wiring, results) if name in GRAPHS else ():  # of the same calls: do they read the same?
            if left == right:
                left, right = Counter(finer(GRAPHS[name](before))), Counter(finer(GRAPHS[name](after)))
        if left != right:
            found.append(StageDiff(number, tuple((left - right).items()), tuple((right - left).items())))
    ends = tuple(f"{which} {one.end}" for which, one in (("A", before), ("B", after)) if one.end is not None)
    return StoryDiff(title(before), title(after), tuple(found), diff_times(before, after), ends)


def title(story: Story) -> str:
    return f"{story.target} ({story.backend}, torch {story.torch})"


def calls_of(graphs: Iterable[StageGraph]) -> list[str]:
    """Each call with its numbers and its type, without names: `aten.mul.Tensor(_, 2) : f32[4, 8]`."""
    return [
        f"{node.op}({NAME.sub('_', node.args)}) : {node.type}"
        for graph in graphs
        for node in graph.nodes
        if node.op not in NO_CALLS
    ]


def wiring(graphs: Iterable[StageGraph]) -> list[str]:
    """Each call, and what is returned, with the ops that it reads."""
    found = []
    for graph in graphs:
        names = labels(graph)
        found += [read_with(names, node) for node in graph.nodes if node.op not in ("placeholder", "get_attr")]
    return found


def results(graphs: Iterable[StageGraph]) -> list[str]:
    """What is returned, by a digest of all that it is made of."""
    found = []
    for graph in graphs:
        names = labels(graph)
        for node in graph.nodes:
            if node.op not in ("placeholder", "get_attr"):
                names[node.name] = hashlib.sha256(read_with(names, node).encode()).hexdigest()[:8]
        found += [f"the same calls in another order: {names[n.name]}" for n in graph.nodes if n.op == "output"]
    return found


def labels(graph: StageGraph) -> dict[str, str]:
    """The op of each node; an input by its position, since names are the program's."""
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    return {n.name: n.op for n in graph.nodes} | {name: f"input {index}" for index, name in enumerate(inputs)}


def read_with(names: Mapping[str, str], node: StageNode) -> str:
    return f"{node.op}({NAME.sub(lambda found: names.get(found[1], found[0]), node.args)})"


def dynamo_facts(story: Story) -> list[str]:
    stage = story.dynamo
    facts = [*calls_of(stage.graphs), f"{len(stage.graphs)} graphs"]
    facts += [f"break at {one.line}: {one.reason}" for one in stage.breaks]
    facts += [f"guard {g.kind}" for g in stage.guards for _ in range(g.count)]
    facts += [f"recompiled: {r.guard} ({r.expected} → {r.actual})" for r in stage.recompilations]
    return facts + [f"symbol {one.source}" for one in stage.symbols]


def functional_facts(story: Story) -> list[str]:
    stage = story.functional
    return calls_of(stage.graphs) + [f"write by {m.by} at {m.line}: {m.fate}" for m in stage.mutations]


def post_grad_facts(story: Story) -> list[str]:
    stage = story.post_grad
    facts = [
        f"{p.subsystem}/{p.name}: -{dict(p.removed)} +{dict(p.added)}" for p in stage.passes if p.removed or p.added
    ]
    return (
        calls_of(stage.graphs)
        + facts
        + [f"graft {f.transform}: {f.status}, {f.matches} matches" for f in stage.fusions if f.matches]
    )


def scheduling_facts(story: Story) -> list[str]:
    stage = story.scheduling
    groups: dict[tuple[str, str], list[str]] = {}
    for node in stage.nodes:
        groups.setdefault((node.graph, node.group), []).append(node.kind)
    facts = [f"group of {', '.join(kinds)}" for kinds in groups.values()]
    facts += [f"copy of {c.bytes} bytes: {c.reason}" for c in stage.copies]
    return facts + [f"moves {count} bytes" for count in stage.bytes_after.values()]


def kernel_facts(story: Story) -> list[str]:
    """By source without names: the same loop under another number is the same."""
    facts = []
    for kernel in story.kernels.kernels:
        text = kernel.source.replace(kernel.name, "kernel")
        source = hashlib.sha256(text.encode()).hexdigest()[:8] if text else ""
        facts += [f"{kernel.language} {kernel.name.rstrip('0123456789')}{source}"] * kernel.launches
    return facts


def runtime_facts(story: Story) -> list[str]:
    stage = story.runtime
    facts = [f"CUDA graph {'recorded' if one.recorded else f'skipped: {one.reason}'}" for one in stage.cudagraphs]
    facts += [f"allocates {count} buffers" for count in stage.allocations.values()]
    return [*facts, f"{stage.streams} streams", *stage.collectives]


def cache_facts(story: Story) -> list[str]:
    stage = story.caches
    facts = [f"{one.cache}: {one.outcome} {one.reason}" for one in (*stage.lookups, *stage.again)]
    keys = [f"key {name}: {text.partition(' ')[0]}" for one in stage.lookups for name, text in one.components.items()]
    return facts + keys


def without_keys(story: Story) -> Story:
    """For a run of another torch, whose keys have other parts throughout: that alone is to be told."""
    parts = {"torch": f"{story.torch} in every key"}
    lookups = tuple(replace(one, components=parts) for one in story.caches.lookups)
    return replace(story, caches=replace(story.caches, lookups=lookups))


FACTS: dict[str, Callable[[Story], list[str]]] = {
    "dynamo": dynamo_facts,
    "functional": functional_facts,
    "post_grad": post_grad_facts,
    "scheduling": scheduling_facts,
    "kernels": kernel_facts,
    "runtime": runtime_facts,
    "caches": cache_facts,
}


GRAPHS: dict[str, Callable[[Story], tuple[StageGraph, ...]]] = {
    "dynamo": lambda story: story.dynamo.graphs,
    "functional": lambda story: story.functional.graphs,
    "post_grad": lambda story: story.post_grad.graphs,
}


def diff_lines(diff: StoryDiff, *, unfold: bool = False) -> list[StyledLine]:
    lines = [StyledLine("title", f"{diff.before} → {diff.after}")]
    lines += [StyledLine("removed", one) for one in diff.ends]
    if diff.first is None:
        return [*lines, StyledLine("plain", "all seven stages are the same"), *time_lines(diff.times, unfold)]
    lines.append(StyledLine("plain", f"first difference in stage {diff.first}, {TITLES[diff.first - 1]}"))
    for stage in diff.stages:
        lines.append(StyledLine("head", f"{stage.stage} {TITLES[stage.stage - 1]}"))
        for style, sign, facts in (("removed", "-", stage.removed), ("added", "+", stage.added)):
            texts = [f"  {sign} {fact}{f'  × {times}' if times > 1 else ''}" for fact, times in facts]
            lines += [StyledLine(style, text) for text in (texts if unfold else cut(texts, 8))]
    return lines + time_lines(diff.times, unfold)
