"""Differences as lines for people. The terminal colours them by style, Markdown puts them into `diff` blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from graft.passes.report import TransformRecord
from graft.workbench.diff import GraphDiff, NodeChange
from graft.workbench.diff_runs import RunDiff, TransformDiff
from graft.workbench.layers import Folded, LayerGroup, fold, ranges, unfolded

Style = Literal["title", "head", "added", "removed", "changed", "plain"]
SIGNS = {"added": "+", "removed": "-"}


@dataclass(frozen=True)
class StyledLine:
    style: Style
    text: str


def transform_lines(
    model: str, record: TransformRecord, diff: GraphDiff, *, unfold: bool = False
) -> list[StyledLine]:
    """Before and after one transform."""
    matches, misses = counted(len(record.matches), "match"), counted(len(record.near_misses), "near miss")
    lines = [StyledLine("title", f"{record.name} on {model}: {record.status}, {matches}, {misses}; {summary(diff)}")]
    if record.reason:
        lines.append(StyledLine("plain", record.reason))
    return lines + graph_lines(diff, unfold=unfold)


def run_lines(diff: RunDiff, *, unfold: bool = False) -> list[StyledLine]:
    """Two runs: what they were made of, the transforms that differ, the graphs."""
    lines = [StyledLine("title", f"{diff.before} → {diff.after}")]
    lines += [StyledLine("plain", f"{d.what}: {d.before} → {d.after}") for d in diff.made_of]
    for transform in diff.transforms:
        lines += record_lines(transform)
    if not diff.transforms:
        lines.append(StyledLine("plain", "every transform did the same" if not diff.transform else "it did the same"))
    if diff.graph is None:
        return [*lines, StyledLine("plain", f"no graphs to compare: {diff.note}")]
    where = f"graphs after {diff.transform}" if diff.transform else "last graphs"
    return [*lines, StyledLine("head", f"{where}: {summary(diff.graph)}"), *graph_lines(diff.graph, unfold=unfold)]


def record_lines(diff: TransformDiff) -> Iterator[StyledLine]:
    parts = []
    if diff.status[0] != diff.status[1]:
        parts.append(f"{diff.status[0]} → {diff.status[1]}")
    for name, (before, after) in (("matches", diff.matches), ("near misses", diff.near_misses)):
        if before != after:
            parts.append(f"{name} {before} → {after}")
    yield StyledLine("head", f"{diff.name}: {', '.join(parts) or 'as many, but elsewhere'}")
    yield from (StyledLine("removed", f"  - matched at {site}") for site in diff.lost)
    yield from (StyledLine("added", f"  + matched at {site}") for site in diff.gained)
    yield from (StyledLine("removed", f"  - near miss at {site}") for site in diff.gone_misses)
    yield from (StyledLine("added", f"  + near miss at {site}") for site in diff.new_misses)


def summary(diff: GraphDiff) -> str:
    counts = ", ".join(f"{number} {kind}" for kind, number in diff.counts.items() if number)
    return f"{len(diff.before)} → {len(diff.after)} nodes, {counts or 'no difference'}"


def graph_lines(diff: GraphDiff, *, unfold: bool = False) -> list[StyledLine]:
    """By layer, equal layers once; `unfold` shows every layer by itself."""
    folded = unfolded(diff) if unfold else fold(diff)
    several = len({group.stack for group in folded.layers}) > 1
    lines = [
        StyledLine("changed", f"  ~ {d.what} {d.before} → {d.after} in {number} nodes")
        for d, number in folded.everywhere
    ]
    for group in folded.layers:
        lines += usual_lines(group, several) if group.usual else differing_lines(group, several)
    return [*lines, *outside_lines(folded)]


def usual_lines(group: LayerGroup, several: bool) -> Iterator[StyledLine]:
    if not group.changes:
        yield StyledLine("head", f"{layers_text(group, several)}: no difference")
        return
    shown = f", layer {group.shown} shown" if len(group.indices) > 1 else ""
    yield StyledLine("head", f"{layers_text(group, several)}{shown}")
    yield from change_lines(group.changes)


def differing_lines(group: LayerGroup, several: bool) -> Iterator[StyledLine]:
    verb = "differ" if len(group.indices) > 1 else "differs"
    head = f"{layers_text(group, several)} {verb}:"
    if not group.changes:
        yield StyledLine("head", f"{head} nothing changed there")
        return
    others = f"{len(group.extra)} other{'' if len(group.extra) == 1 else 's'}"
    yield StyledLine("head", f"{head} {len(group.missing)} of these not there, {others}")
    yield from change_lines(group.missing, "not there: ")
    yield from change_lines(group.extra)


def layers_text(group: LayerGroup, several: bool) -> str:
    times = f" × {len(group.indices)}" if len(group.indices) > 1 else ""
    stack = f" of {group.stack or 'the root'}" if several else ""
    return f"layer{'s' if times else ''} {ranges(group.indices)}{stack}{times}"


def outside_lines(folded: Folded) -> Iterator[StyledLine]:
    if folded.outside and folded.layers:
        yield StyledLine("head", "outside the layers")
    for repeated in folded.outside:
        times = f"    × {repeated.times}" if repeated.times > 1 else ""
        yield from (StyledLine(line.style, line.text + times) for line in change_lines([repeated.change]))


def change_lines(changes: Iterable[NodeChange], prefix: str = "") -> Iterator[StyledLine]:
    for change in changes:
        style: Style = change.kind if change.kind in ("added", "removed") else "changed"
        yield StyledLine(style, f"  {SIGNS.get(change.kind, '~')} {prefix}{change_text(change)}")


def change_text(change: NodeChange) -> str:
    """The node's line, or what changed of it: `%linear aten.linear: input %mul_3 → %rms_norm    # model.layers.0`."""
    node = change.node
    if change.kind in ("added", "removed"):
        return node.text()
    details = ", ".join(f"{d.what} {d.before} → {d.after}" for d in change.details)
    site = f"    # {node.module}" if node.module else ""
    what = node.target if node.is_leaf else node.op
    return f"%{node.name} {what}: {'' if change.kind == 'rewired' else f'{change.kind} '}{details}{site}"


def counted(number: int, what: str) -> str:
    """`1 match`, `2 matches`."""
    return f"{number} {what}{'' if number == 1 else 'es'}"


def markdown(lines: Iterable[StyledLine]) -> str:
    """Titles and heads as headings, changes in `diff` blocks, which review tools colour."""
    found: list[str] = []
    block = False
    for line in lines:
        inside = line.style in ("added", "removed", "changed")
        if inside != block:
            found.append("```diff" if inside else "```")
            block = inside
        if inside:
            text = line.text.strip()
            found.append(f"!{text[1:]}" if text.startswith("~") else text)
        else:
            found += ["", {"title": "## ", "head": "### "}.get(line.style, "- ") + line.text, ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*found, "```"] if block else found).strip()) + "\n"


def graph_dict(diff: GraphDiff) -> dict[str, Any]:
    folded = fold(diff)
    return {
        "nodes_before": len(diff.before),
        "nodes_after": len(diff.after),
        "counts": diff.counts,
        "layers": [
            {"stack": g.stack, "layers": list(g.indices), "changes": len(g.changes), "usual": g.usual}
            for g in folded.layers
        ],
        "changes": [change.to_dict() for change in diff.changes],
    }
