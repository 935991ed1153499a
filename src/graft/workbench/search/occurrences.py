"""A pattern in one graph: where it fits, and where it nearly does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from graft.ir.nodes import calls, module_path
from graft.ir.patterns.match import Finder
from graft.workbench.discover.calls import is_free, node_inputs
from graft.workbench.discover.grouping import folded
from graft.workbench.discover.source import op_name
from graft.workbench.search.pattern import SearchPattern


@dataclass(frozen=True)
class GraphHits:
    """In one graph. sites: folded module paths with counts; nearly: what stopped, with counts."""

    graph: str
    exact: int
    sites: tuple[tuple[str, int], ...]
    near: int
    nearly: tuple[tuple[str, int], ...]
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "graph": self.graph,
            "exact": self.exact,
            "sites": [{"module": path, "count": count} for path, count in self.sites],
            "near": self.near,
            "nearly": [{"reason": reason, "count": count} for reason, count in self.nearly],
            "problem": self.problem,
        }


def search_graph(pattern: SearchPattern, graph: Graph, name: str) -> GraphHits:
    if pattern.function is not None:
        matches, misses = Finder(pattern.function, dict(pattern.shapes)).find(graph)
        return hits(name, [match.anchor for match in matches], [miss.reason for miss in misses])
    found, missed = chains(graph, pattern.ops)
    return hits(name, found, missed)


def hits(name: str, anchors: list[Node], reasons: list[str]) -> GraphHits:
    sites = Counter(folded(module_path(node)) or "the root module" for node in anchors)
    why = Counter(reasons)
    return GraphHits(name, len(anchors), tuple(sites.most_common()), len(reasons), tuple(why.most_common(5)))


def chains(graph: Graph, ops: tuple[str, ...]) -> tuple[list[Node], list[str]]:
    """Calls in which the line ends, each read by the next through views; and lines of which one op is another."""
    found: list[Node] = []
    missed: list[str] = []
    for node in calls(graph):
        if is_free(node) and op_name(node) not in ops:
            continue
        short = best(node, ops)
        if short == []:
            found.append(node)
        elif len(ops) > 2 and short is not None and len(short) == 1:
            missed.append(short[0])
    return found, missed


def best(node: Node, ops: tuple[str, ...]) -> list[str] | None:
    """What differs along the path back from `node` that fits best; None where its end does not."""
    if op_name(node) != ops[-1]:
        return None
    return back(node, ops[:-1])


def back(node: Node, ops: tuple[str, ...]) -> list[str]:
    if not ops:
        return []
    tried = [wrong(source, ops) for source in before(node, ops[-1])]
    return min(tried, key=len, default=[f"nothing is read where {ops[-1]} should be"] * len(ops))


def wrong(source: Node, ops: tuple[str, ...]) -> list[str]:
    here = [] if op_name(source) == ops[-1] else [f"{op_name(source)} in place of {ops[-1]}"]
    return here if len(here) > 1 else [*here, *back(source, ops[:-1])]


def before(node: Node, wanted: str) -> list[Node]:
    """The calls that a node reads, views skipped unless one is asked for."""
    found = []
    for source in node_inputs(node):
        while source.op == "call_function" and is_free(source) and op_name(source) != wanted and node_inputs(source):
            source = node_inputs(source)[0]
        if source.op == "call_function":
            found.append(source)
    return found
