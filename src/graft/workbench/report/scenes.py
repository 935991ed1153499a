"""Before and after one transform as one drawing: the nodes of both graphs, those that are in both once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from graft.ir.facts import Item, LayerPath, homes
from graft.workbench.diff import GraphDiff
from graft.workbench.diff_text import change_text, layers_text
from graft.workbench.layers import Folded
from graft.workbench.report.merged import Parts, parts_of
from graft.workbench.report.packing import Readers, StringTable, pack_item, port_name
from graft.workbench.report.sizes import SizeNames

KINDS = {"removed": 1, "added": 2, "rewired": 3, "literal": 4, "metadata": 4}
SAME, REMOVED, ADDED = 0, 1, 2
LARGEST = 400  # nodes of one drawing; what is larger is told as text alone


@dataclass(frozen=True)
class Both:
    """Two graphs under one numbering: nodes after by their index, removed ones behind them."""

    items: list[Item]
    kinds: dict[int, int]
    notes: dict[int, list[str]]
    homes: list[LayerPath | None]
    edges: dict[tuple[int, int], int]
    source_kinds: list[int]
    parts: list[tuple[str, ...]]  # of merged weights and their readers


def both_graphs(diff: GraphDiff, sizes: SizeNames, merged: Parts) -> Both:
    number: dict[int, int] = {old: new for new, old in enumerate(diff.partners) if old is not None}
    items, layers = sizes.items(diff.after), homes(diff.after)
    parts = [parts_of(item, diff.after, merged) for item in diff.after]
    before_homes, after, before = homes(diff.before), Readers(diff.after), Readers(diff.before)
    source_kinds = [after.kind(item) for item in diff.after]
    for item in diff.before:
        if item.index not in number:
            number[item.index] = len(items)
            items.append(sizes.item(item))
            parts.append(parts_of(item, diff.before, merged))
            layers.append(before_homes[item.index])
            source_kinds.append(before.kind(item))
    kinds: dict[int, int] = {}
    notes: dict[int, list[str]] = {}
    for change in diff.changes:
        at = change.after.index if change.after is not None else number[change.node.index]
        kinds[at] = min(KINDS[change.kind], kinds.get(at, 4))
        if change.details:
            notes.setdefault(at, []).append(sizes.text(change_text(change).strip()))
    new = {(index, item.index) for item in diff.after for _, index in item.inputs}
    old = {(number[index], number[item.index]) for item in diff.before for _, index in item.inputs}
    edges = {edge: SAME if edge in old else ADDED for edge in sorted(new)}
    edges |= {edge: REMOVED for edge in sorted(old - new)}
    return Both(items, kinds, notes, layers, edges, source_kinds, parts)


def scenes(
    diff: GraphDiff,
    folded: Folded,
    strings: StringTable,
    sizes: SizeNames | None = None,
    merged: Parts | None = None,
) -> list[dict[str, Any]]:
    """One drawing for each group of layers with equal changes, and one of what changed outside the layers."""
    both = both_graphs(diff, sizes or SizeNames(), merged or {})
    several = len({group.stack for group in folded.layers}) > 1
    found = []
    for group in folded.layers:
        if group.changes:
            layer = LayerPath(group.stack, group.shown)
            members = [i for i, home in enumerate(both.homes) if home == layer]
            text = layers_text(group, several)
            shown = f", layer {group.shown} shown" if len(group.indices) > 1 else "" if group.usual else " differs"
            found.append(scene(f"{text}{shown}", both, members, strings, layer))
    if folded.outside:
        found.append(outside(both, folded, strings))
    return found


def outside(both: Both, folded: Folded, strings: StringTable) -> dict[str, Any]:
    """What changed outside the layers, repeated ones once, and its neighbours there."""
    times = {(r.change.kind == "removed", r.change.node.index): r.times for r in folded.outside}
    count = {
        i: times.get((both.kinds[i] == REMOVED, both.items[i].index))
        for i in both.kinds
        if both.homes[i] is None and (both.kinds[i] == REMOVED, both.items[i].index) in times
    }
    near = {i for edge in both.edges for i in edge if set(edge) & set(count)}
    members = sorted(set(count) | {i for i in near if both.homes[i] is None and i not in both.kinds})
    title = "outside the layers" if folded.layers else "the graph"
    found = scene(title, both, members, strings, None)
    found["times"] = {members.index(i): number for i, number in count.items() if number and number > 1}
    return found


def scene(
    title: str, both: Both, members: Iterable[int], strings: StringTable, layer: LayerPath | None
) -> dict[str, Any]:
    """nodes: packed, with kind of change and what changed. edges: [from, to, kind]. outer: [to, name, how it is
    drawn, kind]. `large` instead where it would be too much to draw."""
    ranks = {index: rank for rank, index in enumerate(members)}
    if len(ranks) > LARGEST:
        return {"title": title, "large": len(ranks)}
    nodes = [
        [
            *pack_item(both.items[i], strings, layer, both.parts[i]),
            both.kinds.get(i, 0),
            "\n".join(both.notes.get(i, ())),
        ]
        for i in ranks
    ]
    edges = [[ranks[a], ranks[b], kind] for (a, b), kind in both.edges.items() if a in ranks and b in ranks]
    outer = [
        [ranks[b], port_name(both.items[a]), both.source_kinds[a], kind]
        for (a, b), kind in both.edges.items()
        if b in ranks and a not in ranks
    ]
    elsewhere = sorted({ranks[a] for a, b in both.edges if a in ranks and b not in ranks})
    ports = [ranks[i] for i in ranks if both.source_kinds[i] == 1]
    number = layer.index if layer else None
    return {
        "title": title, "nodes": nodes, "edges": edges, "outer": outer, "elsewhere": elsewhere, "hubs": ports,
        "layer": number,
    }  # fmt: skip
