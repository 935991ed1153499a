"""Before and after one transform side by side, as text: what is in both stands on one row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from graft.ir.facts import Item, LayerPath, homes
from graft.workbench.diff import GraphDiff
from graft.workbench.layers import Folded
from graft.workbench.report.sizes import SizeNames

AROUND = 2  # equal rows that are shown before and after a change
MOST = 600  # rows of one part; what is longer ends with how many more there are
RowKind = Literal["same", "removed", "added", "replaced", "changed", "gap"]


@dataclass(frozen=True)
class SideCell:
    """A node's call and value; where it comes from, and its name."""

    text: str
    origin: str
    name: str


@dataclass(frozen=True)
class SideRow:
    """gap: so many equal rows are left out, which `count` tells."""

    kind: RowKind
    left: SideCell | None = None
    right: SideCell | None = None
    count: int = 0


def side_rows(diff: GraphDiff, folded: Folded, sizes: SizeNames) -> list[list[SideRow]]:
    """One list for each drawing of `scenes`, in their order: groups of equal layers, then what is outside them."""
    before, after = homes(diff.before), homes(diff.after)
    layers: list[LayerPath | None] = [LayerPath(g.stack, g.shown) for g in folded.layers if g.changes]
    if folded.outside:
        layers.append(None)
    return [rows_of(diff, sizes, before, after, layer) for layer in layers]


def rows_of(
    diff: GraphDiff,
    sizes: SizeNames,
    before: Sequence[LayerPath | None],
    after: Sequence[LayerPath | None],
    layer: LayerPath | None,
) -> list[SideRow]:
    kept = {old for old in diff.partners if old is not None}
    changed = {change.after.index for change in diff.changes if change.after is not None}
    gone = [item for item in diff.before if item.index not in kept and before[item.index] == layer]
    rows: list[SideRow] = []
    for item in diff.after:
        partner = diff.partners[item.index]
        if after[item.index] != layer or (item.is_leaf and item.index not in changed):
            continue
        if partner is None:
            rows.append(SideRow("added", None, cell(item, sizes)))
            continue
        while gone and gone[0].index < partner:
            rows.append(SideRow("removed", cell(gone.pop(0), sizes)))
        kind: RowKind = "changed" if item.index in changed else "same"
        rows.append(SideRow(kind, cell(diff.before[partner], sizes), cell(item, sizes)))
    rows += [SideRow("removed", cell(item, sizes)) for item in gone]
    return folded_rows(list(paired(rows)))


def cell(item: Item, sizes: SizeNames) -> SideCell:
    value = item.value.replace("@meta", "")
    text = sizes.text(f"{item.call} : {value}" if value else item.call)
    return SideCell(text, " · ".join(filter(None, (item.module, item.source, item.made_by))), item.name)


def paired(rows: Iterable[SideRow]) -> Iterable[SideRow]:
    """What went stands beside what came in its stead."""
    left: list[SideRow] = []
    right: list[SideRow] = []
    for row in (*rows, SideRow("gap")):
        if row.kind == "removed":
            left.append(row)
        elif row.kind == "added":
            right.append(row)
        else:
            for old, new in zip_longest(left, right):
                kind: RowKind = "replaced" if old and new else "removed" if old else "added"
                yield SideRow(kind, old.left if old else None, new.right if new else None)
            left, right = [], []
            if row.kind != "gap":
                yield row


def folded_rows(rows: Sequence[SideRow]) -> list[SideRow]:
    """Equal rows far from any change as their number."""
    near = {i + by for i, row in enumerate(rows) if row.kind != "same" for by in range(-AROUND, AROUND + 1)}
    found: list[SideRow] = []
    skipped = 0
    for index, row in enumerate(rows):
        if index not in near:
            skipped += 1
            continue
        found += [SideRow("gap", count=skipped)] if skipped else []
        found.append(row)
        skipped = 0
    found += [SideRow("gap", count=skipped)] if skipped else []
    more = len(found) - MOST
    return found if more <= 0 else [*found[:MOST], SideRow("gap", count=more)]
