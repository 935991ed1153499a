"""The difference of two graphs: nodes that were added, removed, rewired, or have other literals or metadata.

Nodes are compared by what they are (align.py), so a graph whose nodes all have other names has no difference.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from torch.fx import Graph

from graft.ir.facts import Item, LayerPath, homes, read_graph, same_symbols
from graft.workbench.align import Alignment, align

Kind = Literal["added", "removed", "rewired", "literal", "metadata"]
KINDS: tuple[Kind, ...] = ("added", "removed", "rewired", "literal", "metadata")
VALUE = re.compile(r"([\w.]+)\[(.*)\](@.*)?")


@dataclass(frozen=True)
class Detail:
    """One thing that changed: the slot of an argument, or `dtype`, `shape`, `device`, `module`, `stack_trace`…"""

    what: str
    before: str
    after: str


@dataclass(frozen=True)
class NodeChange:
    """One node: as it was, as it is. `layer`: the one it belongs to."""

    kind: Kind
    before: Item | None
    after: Item | None
    details: tuple[Detail, ...] = ()
    layer: LayerPath | None = None

    @property
    def node(self) -> Item:
        node = self.after or self.before
        assert node is not None
        return node

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "layer": self.layer.index if self.layer else None,
            "module": self.node.module,
            "op": self.node.op,
            "before": self.before.text() if self.before else None,
            "after": self.after.text() if self.after else None,
            "details": [{"what": d.what, "before": d.before, "after": d.after} for d in self.details],
        }


@dataclass(frozen=True)
class GraphDiff:
    """The nodes of both graphs, and what is different between them."""

    before: tuple[Item, ...]
    after: tuple[Item, ...]
    changes: tuple[NodeChange, ...]
    partners: tuple[int | None, ...] = ()  # for each node after: which one it was before

    def of(self, kind: Kind) -> tuple[NodeChange, ...]:
        return tuple(change for change in self.changes if change.kind == kind)

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(change.kind for change in self.changes)
        return {kind: found[kind] for kind in KINDS}

    @property
    def layers(self) -> tuple[LayerPath, ...]:
        """Every layer of either graph: one without a change is one too."""
        found = {layer for items in (self.before, self.after) for layer in homes(items) if layer is not None}
        return tuple(sorted(found, key=lambda layer: (layer.stack, layer.index)))

    def __bool__(self) -> bool:
        return bool(self.changes)


def diff_graphs(before: Graph, after: Graph) -> GraphDiff:
    """What of `before` is not so in `after`. Both may be live, or loaded from dumps without weights."""
    old = read_graph(before)
    new = same_symbols(old, read_graph(after))
    found = align(old, new)
    home_before, home_after = homes(old), homes(new)
    changes = [NodeChange("removed", item, None, (), home_before[item.index]) for item in found.open_before()]
    for item in new:
        partner, home = found.to_before[item.index], home_after[item.index]
        if partner is None:
            changes.append(NodeChange("added", None, item, (), home))
        else:
            wires, literals = argument_changes(found, old[partner], item)
            metadata = metadata_changes(old[partner], item)
            kinds: tuple[tuple[Kind, list[Detail]], ...] = (
                ("rewired", wires),
                ("literal", literals),
                ("metadata", metadata),
            )
            changes += [
                NodeChange(kind, old[partner], item, tuple(details), home) for kind, details in kinds if details
            ]
    return GraphDiff(tuple(old), tuple(new), tuple(in_order(changes, old, new)), tuple(found.to_before))


def in_order(changes: list[NodeChange], old: list[Item], new: list[Item]) -> list[NodeChange]:
    """By module, as the graphs come to them; in a module what went, what came, what changed."""
    first: dict[str, float] = {}
    for items in (old, new):
        for item in items:
            share = item.index / len(items)
            first[item.site] = min(share, first.get(item.site, share))
    ranks = {"removed": 0, "added": 1}
    return sorted(changes, key=lambda c: (first[c.node.site], c.node.site, ranks.get(c.kind, 2), c.node.index))


def argument_changes(found: Alignment, old: Item, new: Item) -> tuple[list[Detail], list[Detail]]:
    """Inputs that are others, and literals that are others."""
    wires, literals = [], []
    old_in, new_in, old_literals, new_literals = map(dict, (old.inputs, new.inputs, old.literals, new.literals))
    for slot in dict.fromkeys((*old_in, *new_in, *old_literals, *new_literals)):
        here, there = old_in.get(slot), new_in.get(slot)
        if here is not None and there is not None and found.to_after[here] == there:
            continue
        left = old_literals.get(slot, "default") if here is None else f"%{found.before[here].name}"
        right = new_literals.get(slot, "default") if there is None else f"%{found.after[there].name}"
        if here is not None or there is not None:
            wires.append(Detail(slot, left, right))
        elif left != right:
            literals.append(Detail(slot, left, right))
    return wires, literals


def metadata_changes(old: Item, new: Item) -> list[Detail]:
    details = value_changes(old.value, new.value)
    for what, before, after in (
        ("module", old.module, new.module),
        ("stack_trace", old.source, new.source),
        ("made_by", old.made_by, new.made_by),
    ):
        if before != after:
            details.append(Detail(what, before or "none", after or "lost"))
    return details


def value_changes(old: str, new: str) -> list[Detail]:
    """`f32[2, 4]` → `f16[2, 4]` is a change of dtype; what is not one tensor is a change of value."""
    if old == new:
        return []
    left, right = VALUE.fullmatch(old), VALUE.fullmatch(new)
    if left is None or right is None:
        return [Detail("value", old or "none", new or "lost")]
    parts = zip(("dtype", "shape", "device"), left.groups(default="cpu"), right.groups(default="cpu"), strict=True)
    return [Detail(what, here.strip("@"), there.strip("@")) for what, here, there in parts if here != there]
