"""One node or line through all stages: what it came from, what became of it, which kernel computes it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from graft.base.errors import StoryEnded, UsageError
from graft.stages.story import ScheduledNode, StageGraph, StageNode, Story

NO_CALLS = ("placeholder", "get_attr", "output")


@dataclass(frozen=True)
class Trail:
    """Of one graph: names at each stop. gone: why nothing is left of it at the end, where that is so."""

    graph: str
    asked: str
    lines: tuple[str, ...]
    dynamo: tuple[str, ...]
    functional: tuple[str, ...]
    post_grad: tuple[str, ...]
    scheduled: tuple[str, ...]
    groups: tuple[str, ...]
    kernels: tuple[str, ...]
    gone: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def is_line(word: str) -> bool:
    return re.fullmatch(r"[^:%]*:\d+", word) is not None


def leaf_names(name: str) -> list[str]:
    """A group's name is that of its nodes: `op0_op1`, `true_graph_0_op0`."""
    return re.findall(r"(?:^|_)((?:[A-Za-z]\w*?_)??op\d+)(?=_|$)", name)


def stops(story: Story) -> tuple[tuple[StageGraph, ...], ...]:
    return story.dynamo.graphs, story.functional.graphs, story.post_grad.graphs


def asked_for(node: StageNode, word: str) -> bool:
    """`file.py:12`, `:12`, or a name, with its % or without. A line has what the functions make that it calls."""
    if is_line(word):
        ends = word if word.startswith(":") else ""
        return any(line == word or (ends and line.endswith(ends)) for line in (node.line, *node.callers) if line)
    return node.name == word.removeprefix("%")


def follow(story: Story, word: str) -> tuple[Trail, ...]:
    """A trail for each graph that has the node or line; none is an error that names what there is."""
    found = []
    for graph in dict.fromkeys(one.graph for stop in stops(story) for one in stop):
        parts = [nodes_of(stop, graph) for stop in stops(story)]
        chosen = [[node for node in nodes if asked_for(node, word)] for nodes in parts]
        if any(chosen):
            found.append(trail(story, word, graph, parts, chosen))
    if not found:
        if story.end is not None:
            raise StoryEnded(f"{unknown(story, word)}; the run {story.end}")
        raise UsageError(unknown(story, word))
    return tuple(found)


def unknown(story: Story, word: str) -> str:
    nodes = [node for stop in stops(story) for graph in stop for node in graph.nodes]
    known = (
        {line for node in nodes for line in (node.line, *node.callers) if line}
        if is_line(word)
        else {node.name for node in nodes}
    )
    close = difflib.get_close_matches(word.removeprefix("%"), sorted(known), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "-o DIR writes the graphs with all of them"
    what = f"was made by line {word}" if is_line(word) else f"is named {word!r}"
    return f"no node of {story.target} {what}; {hint}"


def nodes_of(stop: Sequence[StageGraph], graph: str) -> list[StageNode]:
    return [node for one in stop if one.graph == graph for node in one.nodes]


def trail(story: Story, word: str, graph: str, parts: list[list[StageNode]], chosen: list[list[StageNode]]) -> Trail:
    """A name asked for is taken where it occurs first; `add` of Dynamo's graph and of a later one are two things."""
    first = next(index for index, nodes in enumerate(chosen) if nodes)
    roots = {node.name for node in chosen[0]} if first == 0 else {s for node in chosen[first] for s in node.sources}
    dynamo = [node.name for node in parts[0] if node.name in roots and node.op not in NO_CALLS]
    lines = {node.line for node in parts[0] if node.name in roots and node.line}
    later = []
    for index in (1, 2):
        # passes keep names, so a node of the functional graph is that of the same name after them
        own = {node.name for node in chosen[index]} if first > 0 or is_line(word) else set()
        whole = is_line(word) or not own
        calls = [node for node in parts[index] if node.op not in NO_CALLS]
        later.append([n.name for n in calls if n.name in own or (whole and comes_from(n, roots, lines))])
    asked = dict.fromkeys(node.line for nodes in chosen for node in nodes if node.line)
    scheduled = [one for one in story.scheduling.nodes if one.graph == graph and set(one.nodes) & set(later[1])]
    kernels = [k.name for k in story.kernels.kernels if k.graph == graph and set(k.nodes) & set(later[1])]
    groups = tuple(dict.fromkeys(n.group for n in scheduled))
    left = gone(story, graph, later, parts, scheduled, kernels)
    return Trail(
        graph, word, tuple(asked), tuple(dynamo), tuple(later[0]), tuple(later[1]), tuple(n.name for n in scheduled),
        groups, tuple(kernels), left,
    )  # fmt: skip


def comes_from(node: StageNode, roots: set[str], lines: set[str]) -> bool:
    """Writes at the end of a graph know their line alone."""
    return bool(roots & set(node.sources)) or (not node.sources and node.line in lines)


def gone(
    story: Story, graph: str, later: list[list[str]], parts: list[list[StageNode]],
    scheduled: Sequence[ScheduledNode], kernels: Sequence[str],
) -> str:  # fmt: skip
    if kernels:
        return ""
    if not parts[1]:
        return "the run did not come to stage 2 with this graph" if story.end else "no later stage saw this graph"
    if not later[0]:
        if any(not node.sources and not node.line for node in parts[1] if node.op not in NO_CALLS):
            return "not known: the functional graph has calls that remember neither a line nor what they came from"
        return "AOTAutograd left nothing of it: a view, a number, or a value that nothing reads"
    if not later[1]:
        ops = {node.op for node in parts[1] if node.name in later[0]}
        passes = [p.name for p in story.post_grad.passes if p.graph == graph and ops & set(p.removed)]
        return f"taken out of the graph by {', '.join(dict.fromkeys(passes)) or 'a pass'}"
    if not scheduled:
        return "lowered to a view or a constant, or inlined where it is read: no loop of its own"
    return "no kernel is known to compute it"
