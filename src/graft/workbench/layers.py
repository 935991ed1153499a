"""Differences by layer. Layers whose differences are the same up to their number are told once, with how often."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from graft.workbench.diff import Change, Detail, GraphDiff
from graft.workbench.facts import Item, Layer, homes, layer_of

Shape = Callable[[Change], Hashable]


@dataclass(frozen=True)
class Layers:
    """Layers of one stack (`model.layers`) with equal differences; `changes` are those of the first of them.

    usual: whether most layers are so. missing, extra: how the others differ from the usual ones.
    """

    stack: str
    indices: tuple[int, ...]
    changes: tuple[Change, ...]
    usual: bool
    missing: tuple[Change, ...] = ()
    extra: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Repeated:
    """A change outside the layers, and how often it is there but for the numbers in its names."""

    change: Change
    times: int


@dataclass(frozen=True)
class Folded:
    """`everywhere`: what changed in most nodes of the graph, with how many; it is left out of the changes."""

    layers: tuple[Layers, ...]
    outside: tuple[Repeated, ...]
    everywhere: tuple[tuple[Detail, int], ...] = ()


def fold(diff: GraphDiff) -> Folded:
    shape = shapes(diff)
    changes, everywhere = without_everywhere(diff)
    by_stack, outside = by_layer(diff, changes)
    found = [group for stack, layers in by_stack.items() for group in fold_stack(stack, layers, shape)]
    return Folded(tuple(found), tuple(repeated(outside)), everywhere)


def unfolded(diff: GraphDiff) -> Folded:
    """Every layer that has a change by itself."""
    by_stack, outside = by_layer(diff, diff.changes)
    found = [
        Layers(stack, (index,), tuple(changes), usual=True)
        for stack, layers in by_stack.items()
        for index, changes in layers.items()
        if changes
    ]
    return Folded(tuple(found), tuple(Repeated(change, 1) for change in outside))


def by_layer(diff: GraphDiff, changes: Iterable[Change]) -> tuple[dict[str, dict[int, list[Change]]], list[Change]]:
    """By stack and index, layers without a change too; and those of no layer."""
    found: dict[str, dict[int, list[Change]]] = {}
    for layer in diff.layers:
        found.setdefault(layer.stack, {})[layer.index] = []
    outside: list[Change] = []
    for change in changes:
        (outside if change.layer is None else found[change.layer.stack][change.layer.index]).append(change)
    return found, outside


def fold_stack(stack: str, layers: dict[int, list[Change]], shape: Shape) -> list[Layers]:
    if not any(layers.values()):
        return []
    groups: dict[Hashable, list[int]] = {}
    for index, changes in layers.items():
        groups.setdefault(frozenset(Counter(map(shape, changes)).items()), []).append(index)
    first, *others = sorted(groups.values(), key=lambda indices: (-len(indices), indices[0]))
    usual = layers[first[0]]
    found = [Layers(stack, tuple(first), tuple(usual), usual=True)]
    for indices in others:
        own = layers[indices[0]]
        odd = without(usual, own, shape), without(own, usual, shape)
        found.append(Layers(stack, tuple(indices), tuple(own), False, *odd))
    return found


def without(changes: Sequence[Change], others: Sequence[Change], shape: Shape) -> tuple[Change, ...]:
    """Those of `changes` that `others` has none of the same shape for."""
    left = Counter(map(shape, others))
    found = []
    for change in changes:
        if left[shape(change)] > 0:
            left[shape(change)] -= 1
        else:
            found.append(change)
    return tuple(found)


def without_everywhere(diff: GraphDiff) -> tuple[list[Change], tuple[tuple[Detail, int], ...]]:
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


def shapes(diff: GraphDiff) -> Shape:
    """A change without names and the number of its layer: equal for equal layers."""
    sides = ((diff.before, homes(diff.before)), (diff.after, homes(diff.after)))

    def source(index: int, side: int, layer: Layer | None) -> Hashable:
        """What is read. The layer above and what is outside are all one: the first layer reads the embedding."""
        item, home = sides[side][0][index], sides[side][1][index]
        if item.is_leaf:
            return item.op, general(item.target, layer)
        if layer is not None and home == layer:
            return item.op, general(item.module, layer)
        near = home is None or (layer is not None and home == Layer(layer.stack, layer.index - 1))
        return "above" if near else home, item.value

    def shape(change: Change) -> Hashable:
        layer, node = change.layer, change.node
        slots = {detail.what for detail in change.details} if change.kind == "rewired" else None
        inputs: list[Hashable] = []
        if change.kind in ("added", "removed", "rewired"):
            for side, item in enumerate((change.before, change.after)):
                wired = item.inputs if item is not None else ()
                inputs += [(side, s, source(i, side, layer)) for s, i in wired if slots is None or s in slots]
        details = [(d.what, general(d.before, layer), general(d.after, layer)) for d in change.details]
        return (change.kind, own_shape(node, layer), tuple(inputs), () if slots is not None else tuple(details))

    return shape


def own_shape(node: Item, layer: Layer | None) -> Hashable:
    origin = general(node.module, layer), node.source, node.made_by
    return node.op, general(node.target, layer), node.literals, node.value, *origin


def general(path: str, layer: Layer | None) -> str:
    """`model.layers.7.mlp` and `k_cache_7` in layer 7 → `model.layers.*.mlp` and `k_cache_*`."""
    if layer is None:
        return path
    if layer_of(path) == layer:
        return re.sub(rf"(^|\.){layer.index}(\.|$)", r"\1*\2", path, count=1)
    return re.sub(rf"_{layer.index}$", "_*", path)


def repeated(changes: Iterable[Change]) -> list[Repeated]:
    """`%k_cache_0 = input`, `%k_cache_1 = input` → once, × 2."""
    groups: dict[str, list[Change]] = {}
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
