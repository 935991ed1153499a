"""A graph as an overview of parts: folded layers, modules outside them, inputs. One part is drawn at a time.

The flat graph of a 32-layer model has thousands of nodes, and laying it out takes most of a minute; a part has about
sixty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graft.ir.facts import Item, LayerPath, homes, layer_of
from graft.ir.folding import equal_layers
from graft.workbench.layers import ranges
from graft.workbench.report.merged import Parts, parts_of
from graft.workbench.report.packing import Readers, StringTable, pack_item, port_name

RUNS = 12  # boxes of one stack; where layers alternate more often, equal ones share a box wherever they stand


@dataclass
class DrawnGroup:
    """Nodes that are drawn together. `copies`: layers that are the same but for the names."""

    title: str
    layer: LayerPath | None
    members: list[Item] = field(default_factory=list)
    copies: list[LayerPath] = field(default_factory=list)


@dataclass
class Box:
    """A node of the overview: a part, or a run of equal layers, of which `part` is the first one drawn."""

    part: int
    title: str
    layers: list[LayerPath]
    ports: dict[str, None] = field(default_factory=dict)
    inputs: dict[str, None] = field(default_factory=dict)


def pack_step(items: list[Item], strings: StringTable, merged: Parts | None = None) -> dict[str, Any]:
    """One graph: parts with their nodes, boxes with their edges, and a sentence on its layers."""
    same, home = equal_layers(items), homes(items)
    readers = Readers(items)
    keys = part_keys(items, home, readers)
    parts: dict[Any, DrawnGroup] = {}
    members: dict[LayerPath, list[Item]] = {}
    for item, key in zip(items, keys, strict=True):
        layer = key if isinstance(key, LayerPath) else None
        if layer is not None:
            members.setdefault(layer, []).append(item)
        if layer in same:
            continue
        title = f"layer {layer.index}" if layer else module_title(key[0])
        parts.setdefault(key, DrawnGroup(title, layer)).members.append(item)
    for layer in sorted(same, key=lambda one: (one.stack, one.index)):
        parts[same[layer]].copies.append(layer)
    packed = [pack_part(part, items, members, keys, readers, strings, merged or {}) for part in parts.values()]
    boxes, edges = overview(items, keys, parts, same, readers)
    return {"nodes": len(items), "parts": packed, "boxes": boxes, "edges": edges, "said": said(same, members)}


def part_keys(items: list[Item], home: list[LayerPath | None], readers: Readers) -> list[Any]:
    """The layer of a node, or its module with which visit of the module it belongs to: a module whose nodes stand
    before and behind those of others is several parts, so that no arrow between two goes both ways."""
    keys: list[Any] = list(home)
    visits: dict[str, int] = {}
    reads: dict[Any, set[Any]] = {}  # what each part reads, over drawn edges
    for item in items:
        if item.op in ("input", "output"):
            keys[item.index] = ("inputs" if item.op == "input" else "output", 0)
        if item.op in ("weight", "input"):
            continue
        sources = {
            keys[i] for _, i in item.inputs if items[i].op not in ("weight", "input") and i not in readers.ports
        }
        if keys[item.index] is None:
            module = item.module or "the model itself"
            key = (module, visits.setdefault(module, 0))
            if any(reaches(source, key, reads) for source in sources - {key}):
                visits[module] += 1
                key = (module, visits[module])
            keys[item.index] = key
        reads.setdefault(keys[item.index], set()).update(sources - {keys[item.index]})
    for item in reversed(items):  # a weight is with its first reader, which stands below it
        if keys[item.index] is None:
            reader = keys[readers.of[item.index][0]] if readers.of[item.index] else None
            module = item.site.rpartition(".")[0] or "the model itself"
            keys[item.index] = (module, 0) if reader is None or isinstance(reader, LayerPath) else reader
    return keys


def reaches(key: Any, wanted: Any, reads: dict[Any, set[Any]]) -> bool:
    """Whether `key` reads, over others, what `wanted` computes."""
    seen, left = set(), [key]
    while left:
        found = left.pop()
        if found == wanted:
            return True
        if found not in seen:
            seen.add(found)
            left += reads.get(found, ())
    return False


def module_title(module: str) -> str:
    """`model.rotary_emb` → `rotary_emb`; what a layer computes for others says so."""
    layer = layer_of(module)
    last = module.rpartition(".")[2]
    return f"{last}, shared by layers" if layer else last


def pack_part(
    part: DrawnGroup,
    items: list[Item],
    members: dict[LayerPath, list[Item]],
    keys: list[Any],
    readers: Readers,
    strings: StringTable,
    merged: Parts,
) -> dict[str, Any]:
    """nodes: packed, with inputs as [slot, position, …], where -1, -2, … are the entries of `outer`; and whether
    the value is read elsewhere. copies: [number, names, names of outer values] of each equal layer."""
    ranks = {item.index: rank for rank, item in enumerate(part.members)}
    nodes, outer = [], []
    for item in part.members:
        inputs: list[int] = []
        for slot, index in item.inputs:
            if index not in ranks:
                port = strings(port_name(items[index]))
                outer.append([items[index].name, readers.kind(items[index]), strings(origin(keys[index])), port])
            inputs += [strings(slot), ranks[index] if index in ranks else -len(outer)]
        elsewhere = int(any(reader not in ranks for reader in readers.of[item.index]))
        port = int(item.index in readers.ports)
        own = parts_of(item, items, merged)
        nodes.append([*pack_item(item, strings, part.layer, own), inputs, elsewhere, port])
    copies = []
    for layer in part.copies:
        own = {item.index for item in members[layer]}
        names = [items[i].name for item in members[layer] for _, i in item.inputs if i not in own]
        copies.append([layer.index, [item.name for item in members[layer]], names])
    layer = [part.layer.stack, part.layer.index] if part.layer else None
    return {"title": part.title, "layer": layer, "nodes": nodes, "outer": outer, "copies": copies}


def origin(key: Any) -> str:
    return f"layer {key.index}" if isinstance(key, LayerPath) else key[0]


def overview(
    items: list[Item],
    keys: list[Any],
    parts: dict[Any, DrawnGroup],
    same: dict[LayerPath, LayerPath],
    readers: Readers,
) -> tuple[list[list[Any]], list[list[int]]]:
    """Boxes as [part, title, layers, ports, inputs], and edges between them. What is a port is no edge, nor is
    an input of the graph."""
    numbers = {key: number for number, key in enumerate(parts)}
    boxes, where = make_boxes(parts, numbers, same)
    edges: dict[tuple[int, int], None] = {}
    for item in items:
        target = where[keys[item.index]]
        for _, index in item.inputs:
            source = where[keys[index]]
            if source == target or items[index].op == "weight":
                continue
            if index in readers.ports:
                boxes[target].ports[port_name(items[index])] = None
            elif items[index].op == "input":
                boxes[target].inputs[items[index].name] = None
            else:
                edges[source, target] = None
    packed = [
        [box.part, box.title, [layer.index for layer in box.layers], list(box.ports), list(box.inputs)]
        for box in boxes
    ]
    return packed, [list(edge) for edge in edges]


def make_boxes(
    parts: dict[Any, DrawnGroup], numbers: dict[Any, int], same: dict[LayerPath, LayerPath]
) -> tuple[list[Box], dict[Any, int]]:
    """The boxes, and which of them each key is in."""
    boxes: list[Box] = []
    where: dict[Any, int] = {}
    for key in parts:
        if not isinstance(key, LayerPath):
            where[key] = len(boxes)
            boxes.append(Box(numbers[key], parts[key].title, []))
    layers = sorted(
        {key for key in parts if isinstance(key, LayerPath)} | set(same), key=lambda k: (k.stack, k.index)
    )
    for run in layer_runs(layers, same):
        where |= dict.fromkeys(run, len(boxes))
        boxes.append(Box(numbers[same.get(run[0], run[0])], run_title([layer.index for layer in run]), run))
    return boxes, where


def run_title(indices: list[int]) -> str:
    """`layer 7`, `layers 0–6`, `layers 1, 3, 5, …`."""
    parts = ranges(indices).split(", ")
    text = ", ".join(parts if len(parts) <= 4 else [*parts[:3], "…"])
    return f"layer{'s' if len(indices) > 1 else ''} {text}"


def layer_runs(layers: list[LayerPath], same: dict[LayerPath, LayerPath]) -> list[list[LayerPath]]:
    """Equal layers that follow each other; or all equal ones, where that would be too many boxes."""
    runs: list[list[LayerPath]] = []
    groups: dict[LayerPath, list[LayerPath]] = {}
    for layer in layers:
        first = same.get(layer, layer)
        groups.setdefault(first, []).append(layer)
        if runs and same.get(runs[-1][0], runs[-1][0]) == first:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs if len(runs) <= RUNS else list(groups.values())


def said(same: dict[LayerPath, LayerPath], members: dict[LayerPath, list[Item]]) -> str:
    """`32 layers: 0–6, 8–31 are equal (× 31), layer 7 differs`."""
    stacks: dict[str, dict[LayerPath, list[int]]] = {}
    for layer in sorted(members, key=lambda one: (one.stack, one.index)):
        stacks.setdefault(layer.stack, {}).setdefault(same.get(layer, layer), []).append(layer.index)
    texts = []
    for stack, groups in stacks.items():
        ordered = sorted(groups.values(), key=lambda one: -len(one))
        number = sum(map(len, ordered))
        name = f"{stack}: " if len(stacks) > 1 else ""
        if len(ordered) == 1:
            texts.append(f"{name}{number} layer{'s, all equal' if number > 1 else ''}")
            continue
        others = ", ".join(
            f"layers {ranges(group)} differ (× {len(group)})" if len(group) > 1 else f"layer {group[0]} differs"
            for group in ordered[1:]
        )
        equal = f"{ranges(ordered[0])} are equal (× {len(ordered[0])}), " if len(ordered[0]) > 1 else ""
        texts.append(f"{name}{number} layers: {equal}{others if equal else 'no two are equal'}")
    return "; ".join(texts) or "no numbered layers"
