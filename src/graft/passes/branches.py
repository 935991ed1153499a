"""A transform on the graphs that control flow calls, with one record for all of the program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch.fx import GraphModule

from graft.ir.branches import inner_graphs, name_nodes
from graft.passes.report import MatchRecord, TransformRecord

STATUS = ("applied", "rolled_back", "no_match", "skipped", "disabled")  # what is told of several


def run_inside(
    gm: GraphModule, record: TransformRecord, run: Callable[[GraphModule], TransformRecord]
) -> TransformRecord:
    """`record` of the graph itself, with what `run` does in each graph inside of it."""
    if record.status == "disabled":
        return record
    for path, inner in inner_graphs(gm).items():
        found = run(inner)
        names = name_nodes(path, inner.graph)
        inner.recompile()
        record = joined(record, renamed(found, names), path)
    return record


def renamed(record: TransformRecord, names: Mapping[str, str]) -> TransformRecord:
    """Nodes that the transform made have their final names."""

    def match(old: MatchRecord) -> MatchRecord:
        made = tuple(names.get(name, name) for name in old.made)
        successors = tuple((before, names.get(after, after)) for before, after in old.successors)
        return replace(old, made=made, successors=successors)

    return replace(record, matches=tuple(map(match, record.matches)))


def joined(outer: TransformRecord, inner: TransformRecord, path: str) -> TransformRecord:
    status = min(outer.status, inner.status, key=STATUS.index)
    reason = outer.reason
    if status == "applied":
        reason = ""
    elif inner.reason and inner.reason not in reason:
        reason = f"{reason}; in {path}: {inner.reason}"
    return replace(
        outer,
        status=status,
        reason=reason,
        matches=outer.matches + inner.matches,
        near_misses=outer.near_misses + inner.near_misses,
        seconds=outer.seconds + inner.seconds,
        nodes_before=outer.nodes_before + inner.nodes_before,
        nodes_after=outer.nodes_after + inner.nodes_after,
    )
