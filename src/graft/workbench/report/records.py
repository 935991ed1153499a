"""What a transform matched and nearly matched, equal layers told once."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass

from graft.ir.facts import LayerPath, general, layer_of
from graft.ir.patterns.match import NearMiss
from graft.passes.report import MatchRecord, TransformRecord, checks_text
from graft.workbench.diff_runs import folded


@dataclass(frozen=True)
class MatchRow:
    """Matches of one kind. `anchor` is that of the first; `numeric_check` says which used most of what is allowed."""

    site: str
    count: int
    pattern: str
    replaced: tuple[str, ...]
    made: tuple[str, ...]
    anchor: str
    note: str
    numeric_check: str


@dataclass(frozen=True)
class MissRow:
    site: str
    count: int
    pattern: str
    reason: str
    anchor: str
    node: str
    matched: int
    size: int


def match_rows(record: TransformRecord) -> list[MatchRow]:
    groups: dict[Hashable, list[MatchRecord]] = {}
    for match in record.matches:
        site = general(match.module, layer_of(match.module))
        key = site, match.pattern, match.note, len(match.replaced), len(match.made)
        groups.setdefault(key, []).append(match)
    rows = []
    for group in groups.values():
        first = group[0]
        sites = "; ".join(folded(match.module or "the model itself" for match in group))
        rows.append(
            MatchRow(
                sites,
                len(group),
                first.pattern,
                first.replaced,
                first.made,
                first.anchor,
                first.note,
                checks_text(group),
            )
        )
    return rows


def miss_rows(record: TransformRecord) -> list[MissRow]:
    """The nearest first. Forms of a pattern that failed for one reason at one site are one row."""
    groups: dict[Hashable, list[NearMiss]] = {}
    for miss in record.near_misses:
        layer = layer_of(miss.module)
        key = general(miss.module, layer), layerless(miss.reason, layer)
        groups.setdefault(key, []).append(miss)
    rows = []
    for group in groups.values():
        nearest = max(group, key=lambda miss: miss.matched / max(miss.size, 1))
        anchors = {miss.name: miss.module or "the model itself" for miss in group}
        forms = ", ".join(dict.fromkeys(miss.pattern for miss in group if miss.pattern))
        rows.append(
            MissRow(
                "; ".join(folded(anchors.values())), len(anchors), forms,
                nearest.reason, nearest.anchor, nearest.node, nearest.matched, nearest.size,
            )
        )  # fmt: skip
    return sorted(rows, key=lambda row: -row.matched / max(row.size, 1))


def layerless(reason: str, layer: LayerPath | None) -> str:
    """Equal for equal layers: no names of nodes, and layers counted from this one."""
    text = re.sub(r"%\w+", "%…", reason)
    if layer is None:
        return text
    stack = f"{layer.stack}." if layer.stack else ""
    return re.sub(
        rf"(?<![\w.]){re.escape(stack)}(\d+)(?=[.,)])", lambda at: f"{stack}{int(at[1]) - layer.index:+d}", text
    )
