"""Graphs as text with equal layers told once.

A layer whose nodes, in order, are those of an earlier layer up to the number is left out, and a line says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from torch.fx import Graph

from graft.ir.facts import Item, LayerPath, Sources, homes, own_shape, read_graph


def folded_text(graph: Graph) -> str:
    """What graph_text gives, without the layers that are the same as an earlier one."""
    items = read_graph(graph)
    same, layers = equal_layers(items), homes(items)
    counts = Counter(layers)
    lines: list[str] = []
    told: set[LayerPath] = set()
    for item, home in zip(items, layers, strict=True):
        if home is None or home not in same:
            lines.append(item.text())
        elif home not in told and item.op != "weight":
            told.add(home)
            lines.append(f"# layer {home.index}: {counts[home]} nodes, as in layer {same[home].index}")
    return "\n".join(lines) + "\n"


def equal_layers(items: list[Item]) -> dict[LayerPath, LayerPath]:
    """For a layer that is the same as an earlier one, the first of those."""
    sources = Sources(items)
    nodes: dict[LayerPath, list[Item]] = {}
    for item, home in zip(items, sources.homes, strict=True):
        if home is not None:
            nodes.setdefault(home, []).append(item)
    first: dict[Hashable, LayerPath] = {}
    found: dict[LayerPath, LayerPath] = {}
    for layer in sorted(nodes, key=lambda layer: (layer.stack, layer.index)):
        above = LayerPath(layer.stack, layer.index - 1)
        shape = layer_shape(nodes[layer], layer, sources)
        if shape not in first and above in nodes and LayerPath(layer.stack, layer.index - 2) not in nodes:
            blurred = [layer_shape(nodes[each], each, sources, blurred=True) for each in (above, layer)]
            if blurred[0] == blurred[1]:  # the second layer reads the first, which reads something else
                first[shape] = above
        known = first.setdefault(shape, layer)
        if known != layer:
            found[layer] = known
    return found


def layer_shape(members: list[Item], layer: LayerPath, sources: Sources, *, blurred: bool = False) -> Hashable:
    """A layer's nodes in order, without names and its number."""
    ranks = {item.index: rank for rank, item in enumerate(members)}

    def source(index: int) -> Hashable:
        return ranks[index] if index in ranks else sources(index, layer, blurred=blurred)

    shapes = ((own_shape(item, layer), tuple((slot, source(i)) for slot, i in item.inputs)) for item in members)
    return layer.stack, tuple(shapes)
