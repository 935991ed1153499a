"""Differences by layer. Layers whose differences are the same up to their number are told once, with how often."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from graft.ir.facts import Sources, general, own_shape
from graft.workbench.diff import Detail, GraphDiff, NodeChange

Shape = Callable[[NodeChange], Hashable]


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one stack (`model.layers`) with equal differences; `changes` are those of `shown`, one of them.

    usual: whether most layers are so. missing, extra: how the others differ from the usual ones.
    """

    stack: str
    indices: tuple[int, ...]
    shown: int
    changes: tuple[NodeChange, ...]
    usual: bool
    missing: tuple[NodeChange, ...] = ()
    extra: tuple[NodeChange, ...] = ()


@dataclass(frozen=True)
class Repeated:
    """A change outside the layers, and how often it is there but for the numbers in its names."""

    change: NodeChange
    times: int


@dataclass(frozen=True)
class Folded:
    """`everywhere`: what changed in most nodes of the graph, with how many; it is left out of the changes."""

    layers: tuple[LayerGroup, ...]
    outside: tuple[Repeated, ...]
    everywhere: tuple[tuple[Detail, int], ...] = ()


def fold(diff: GraphDiff) -> Folded:
    exact, blurred = shapes(diff), shapes(diff, blurred=True)
    changes, everywhere = without_everywhere(diff)
    by_stack, outside = by_layer(diff, changes)
    found = [group for stack, layers in by_stack.items() for group in fold_stack(stack, layers, exact, blurred)]
    return Folded(tuple(found), tuple(repeated(outside)), everywhere)


def unfolded(diff: GraphDiff) -> Folded:
    """Every layer that has a change by itself."""
    by_stack, outside = by_layer(diff, diff.changes)
    found = [
        LayerGroup(stack, (index,), index, tuple(changes), usual=True)
        for stack, layers in by_stack.items()
        for index, changes in layers.items()
        if changes
    ]
    return Folded(tuple(found), tuple(Repeated(change, 1) for change in outside))


def by_layer(
    diff: GraphDiff, changes: Iterable[NodeChange]
) -> tuple[dict[str, dict[int, list[NodeChange]]], list[NodeChange]]:
    """By stack and index, layers without a change too; and those of no layer."""
    found: dict[str, dict[int, list[NodeChange]]] = {}
    for layer in diff.layers:
        found.setdefault(layer.stack, {})[layer.index] = []
    outside: list[NodeChange] = []
    for change in changes:
        (outside if change.layer is None else found[change.layer.stack][change.layer.index]).append(change)
    return found, outside


def fold_stack(stack: str, layers: dict[int, list[NodeChange]], shape: Shape, blurred: Shape) -> list[LayerGroup]:
    if not any(layers.values()):
        return []
    groups: dict[Hashable, list[int]] = {}
    for index, changes in layers.items():
        groups.setdefault(frozenset(Counter(map(shape, changes)).items()), []).append(index)
    lowest = [min(layers)]
    ordered = sorted(groups.values(), key=lambda indices: (-len(indices), indices == lowest, indices[0]))
    shown = ordered[0][0]
    usual = layers[shown]
    if lowest in ordered[1:] and Counter(map(blurred, layers[lowest[0]])) == Counter(map(blurred, usual)):
        ordered.remove(lowest)  # it reads something else in place of a layer above, and that is all
        ordered[0] = lowest + ordered[0]
    found = [LayerGroup(stack, tuple(ordered[0]), shown, tuple(usual), usual=True)]
    for indices in ordered[1:]:
        own = layers[indices[0]]
        odd = without(usual, own, shape), without(own, usual, shape)
        found.append(LayerGroup(stack, tuple(indices), indices[0], tuple(own), False, *odd))
    return found


def without(changes: Sequence[NodeChange], others: Sequence[NodeChange], shape: Shape) -> tuple[NodeChange, ...]:
    """Those of `changes` that `others` has none of the same shape for."""
    left = Counter(map(shape, others))
    found = []
    for change in changes:
        if left[shape(change)] > 0:
            left[shape(change)] -= 1
        else:
            found.append(change)
    return tuple(found)


def without_everywhere(diff: GraphDiff) -> tuple[list[NodeChange], tuple[tuple[Detail, int], ...]]:
    """Another dtype or device of the whole model is one line, not one for each node."""
    counts = Counter(detail for change in diff.of("metadata") for detail in change.details)
    both = len(diff.after) - len(diff.of("added"))  # nodes that are in both graphs
    everywhere = {detail: n for detail, n in counts.items() if n > 4 and 2 * n > both}
    kept = []
    for change in diff.changes:
        details = tuple(detail for detail in change.details if detail not in everywhere)
        if change.kind != "metadata" or details:
            kept.append(replace(change, details=details) if change.kind == "metadata" else change)
    return kept, tuple(everywhere.items())


def shapes(diff: GraphDiff, *, blurred: bool = False) -> Shape:
    """A change without names and the number of its layer: equal for equal layers."""
    sources = Sources(diff.before), Sources(diff.after)

    def shape(change: NodeChange) -> Hashable:
        layer = change.layer
        if change.kind in ("literal", "metadata"):
            details = [(d.what, general(d.before, layer), general(d.after, layer)) for d in change.details]
            return change.kind, own_shape(change.node, layer), tuple(details)
        slots = {detail.what for detail in change.details}  # of a rewired node; of others all of them
        read = [
            (side, slot, source(index, layer, blurred=blurred))
            for side, (item, source) in enumerate(zip((change.before, change.after), sources, strict=True))
            for slot, index in (item.inputs if item is not None else ())
            if not slots or slot in slots
        ]
        return change.kind, own_shape(change.node, layer), tuple(read)

    return shape


def repeated(changes: Iterable[NodeChange]) -> list[Repeated]:
    """`%k_cache_0 = input`, `%k_cache_1 = input` → once, × 2."""
    groups: dict[str, list[NodeChange]] = {}
    for change in changes:
        details = [(d.what, unnumbered(d.before), unnumbered(d.after)) for d in change.details]
        groups.setdefault(f"{change.kind} {unnumbered(change.node.text())} {details}", []).append(change)
    return [Repeated(group[0], len(group)) for group in groups.values()]


def unnumbered(text: str) -> str:
    """Without the numbers that end names: sizes and literals stay."""
    return re.sub(r"(?<=[a-z])_\d+\b", "", re.sub(r"\bs\d+\b", "s", text))


def ranges(indices: Sequence[int]) -> str:
    """`0–6, 8–31`."""
    parts: list[list[int]] = []
    for index in sorted(indices):
        if parts and index == parts[-1][-1] + 1:
            parts[-1][1:] = [index]
        else:
            parts.append([index])
    return ", ".join("–".join(str(i) for i in part) for part in parts)
