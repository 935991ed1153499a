"""From the graph of a few layers to that of all: the second layer of each kind is written again for those after it.

    before                                    after, for five layers of one kind
    %x = embedding(...)                       %x = embedding(...)
    layer 0:  %c = unsqueeze(%cos) …  → %y    layer 0:  %c = unsqueeze(%cos) …  → %y
    layer 1:  f(%y, %c, weights of 1) → %z    layer 1:  f(%y, %c, weights of 1) → %z
    layer 4:  f(%z, %c, weights of 4) → %t    layer 2:  f(%z, %c, weights of 2) → %u    … 3, 4
    %logits = head(%t)                        %logits = head(%w)

A graph is the data of ir/io/serial.py. Whatever does not have this form raises NoKinds: a second and a last layer of
a kind that differ in more than their weights, something between layers, more than one value from a layer to the next.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graft.capture.layer_entries import (
    Entry,
    attribute_copy,
    layer_of,
    moved,
    references,
    repeated,
    rewritten,
    state_copy,
    storages,
    with_bytes,
)
from graft.capture.layer_kinds import LayerKinds, NoKinds


@dataclass(frozen=True)
class CapturedLayers:
    """attributes, top, bottom: entries of the graph outside of the layers. layers: the calls of each captured one.
    before: for each the captured one before it, for what is below them (None) the last. results: what each gives to
    the next. seen: in which layer (-1: above all) a storage is met first. sizes: of the symbols, two that sizes are
    compared with."""

    path: str
    attributes: list[Entry]
    top: list[Entry]
    layers: dict[int, list[Entry]]
    bottom: list[Entry]
    before: Mapping[int | None, int]
    results: Mapping[int, Entry]
    seen: Mapping[int, int]
    sizes: Sequence[Mapping[str, int]]


@dataclass
class WholeGraph:
    """What was written of the whole graph: its entries, the final names of captured nodes, the names in use.

    storages: how many there are; alike: for each the one that it is read as, or nothing where all are read apart.
    """

    storages: int
    alike: list[int]
    nodes: list[Entry] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)

    def name(self, entry: Entry) -> str:
        """As FX gives them: mul, mul_1, …"""
        base = re.sub(r"_\d+$", "", entry["name"])
        number = self.used.get(base, -1) + 1
        self.used[base] = number
        return f"{base}_{number}" if number else base

    def storage(self, like: int) -> int:
        """A new one, with the contents of another. One that is read as itself may have to be kept apart."""
        if self.alike:
            self.alike.append(self.storages if self.alike[like] == like else self.alike[like])
        self.storages += 1
        return self.storages - 1

    def keep(self, entry: Entry) -> None:
        """An entry with the name that it has."""
        base, _, number = entry["name"].rpartition("_")
        base, number = (base, number) if number.isdigit() else (entry["name"], "0")
        self.used[base] = max(self.used.get(base, -1), int(number))
        self.names[entry["name"]] = entry["name"]
        self.nodes.append(entry)


def repeat_layers(data: Mapping[str, Any], found: LayerKinds) -> dict[str, Any]:
    """The data of the graph with all layers, from that of the one with the chosen ones."""
    if "graphs" in data:
        raise NoKinds("it has control flow")
    captured = take_apart(data, found)
    models = {}  # by kind: the layer to write again
    for kind in dict.fromkeys(found.kinds):
        numbers = [number for number in found.chosen if found.kinds[number] == kind]
        if found.kinds.count(kind) > len(numbers):
            check_alike(captured, numbers[1], numbers[-1])
            models[kind] = numbers[1]
    check_shared(captured, found, models)
    sources = [number if number in found.chosen else models[kind] for number, kind in enumerate(found.kinds)]
    whole = WholeGraph(1 + max(captured.seen, default=-1), [*data.get("alike", ())])
    for entry in repeated(captured.attributes, found.path, sources, attribute_copy):
        whole.keep(entry)
    for entry in captured.top:
        whole.keep(entry)
    write_layers(captured, whole, sources)
    if len({entry["name"] for entry in whole.nodes}) != len(whole.nodes):
        raise NoKinds("two of its nodes would have one name")
    state = repeated([{"name": key, **spec} for key, spec in data["state"].items()], found.path, sources, state_copy)
    found_state = {entry["name"]: {key: value for key, value in entry.items() if key != "name"} for entry in state}
    return {**data, "nodes": whole.nodes, "state": found_state} | ({"alike": whole.alike} if "alike" in data else {})


def take_apart(data: Mapping[str, Any], found: LayerKinds) -> CapturedLayers:
    nodes = data["nodes"]
    attributes = [entry for entry in nodes if entry["op"] == "get_attr"]
    calls = [entry for entry in nodes if entry["op"] != "get_attr"]
    layers: dict[int, list[Entry]] = {number: [] for number in found.chosen}
    top, bottom, last, seen = list[Entry](), list[Entry](), -1, dict[int, int]()
    for entry in calls:
        at = layer_of(entry, found.path)
        if at is None:
            (top if last < 0 else bottom).append(entry)
        elif bottom or at < last or at not in layers:
            raise NoKinds(f"{(bottom or [entry])[0]['name']} is between its layers")
        else:
            layers[at].append(entry)
            last = at
        for storage in storages(entry):
            seen.setdefault(storage, last)
    if not all(layers.values()):
        raise NoKinds("a layer has no nodes of its own")
    symbols = [symbol["name"] for symbol in data["symbols"]]
    sizes = [{name: first + 2 * at for at, name in enumerate(symbols)} for first in (11, 1_000)]
    before = dict(zip((*found.chosen[1:], None), found.chosen, strict=True))
    results = dict(zip(layers, results_of([*layers.values()], bottom), strict=True))
    return CapturedLayers(found.path, attributes, top, layers, bottom, before, results, seen, sizes)


def results_of(layers: Sequence[Sequence[Entry]], bottom: Sequence[Entry]) -> list[Entry]:
    """Of each layer the one node that the next part reads and none after that does."""
    reads = [{name for entry in part for name in references(entry)} for part in (*layers, bottom)]
    results = []
    for at, layer in enumerate(layers):
        later = set[str]().union(*reads[at + 2 :])
        given = [entry for entry in layer if entry["name"] in reads[at + 1] - later]
        if len(given) != 1:
            raise NoKinds(f"{len(given)} values go from a layer to the next")
        results.append(given[0])
    return results


def check_alike(captured: CapturedLayers, second: int, last: int) -> None:
    """That the second layer of a kind, written as the last, is the last."""
    one, other, path = captured.layers[second], captured.layers[last], captured.path
    if len(one) != len(other):
        raise NoKinds(f"its layers have {len(one)} and {len(other)} nodes")
    attributes = [[entry for entry in captured.attributes if layer_of(entry, path) == at] for at in (second, last)]
    earlier = [entry for number, layer in captured.layers.items() if number < second for entry in layer]
    names = {entry["name"]: entry["name"] for entry in (*captured.attributes, *captured.top, *earlier)}
    names |= {a["name"]: b["name"] for a, b in zip(one, other, strict=True)}
    given, given_last = (captured.results[captured.before[number]] for number in (second, last))
    names[given["name"]] = given_last["name"]
    for a, b in zip(*attributes, strict=False):
        names[a["name"]] = b["name"]
        if attribute_copy(a, path, second, last) != b:
            raise NoKinds(f"{a['target']} and {b['target']} differ")
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(storages(a), storages(b), strict=False)]
    numbers = dict(pairs)
    carried = next(storages(given), None)
    kept = all(captured.seen[a] >= second or a in (carried, b) for a, b in pairs)
    if len(attributes[0]) != len(attributes[1]) or not kept or len(set(pairs)) != len(numbers):
        raise NoKinds("its layers share other values")
    for a, b in zip(one, other, strict=True):
        copied = moved(rewritten(a, b["name"], names, numbers), path, second, last)
        if with_bytes(copied, captured.sizes) != with_bytes(b, captured.sizes):
            raise NoKinds(f"{a['name']} and {b['name']}, of layers alike, differ")


def check_shared(captured: CapturedLayers, found: LayerKinds, models: Mapping[str, int]) -> None:
    """That what a layer reads from an earlier one, besides the result before it, is not made anew in between: where
    layers of the kind that makes it are left out, the one that is written for them must read it, too. And that all
    results are of one form, so that a layer may come after any other."""
    values = [with_bytes(result, captured.sizes)["val"] for result in captured.results.values()]
    forms = [{**value["tensor"], "storage": 0} if "tensor" in value else value for value in values]
    if any(form != forms[0] for form in forms):
        raise NoKinds("its layers give values of several forms")
    makers = {entry["name"]: number for number, layer in captured.layers.items() for entry in layer}
    reads = {n: {name for entry in layer for name in references(entry)} for n, layer in captured.layers.items()}
    for number in captured.layers:
        given = captured.results[captured.before[number]]["name"] if number in captured.before else ""
        for name in reads[number]:
            maker = makers.get(name, number)
            model = models.get(found.kinds[maker])
            if (
                maker != number
                and name != given
                and model is not None
                and (maker == model or name not in reads[model])
            ):
                raise NoKinds(f"layer {number} reads a value of layer {maker}")
    owners = {entry["name"]: layer_of(entry, captured.path) for entry in captured.attributes}
    outside = {name for entry in (*captured.top, *captured.bottom) for name in references(entry)}
    foreign = [name for name in outside if owners.get(name) is not None]
    foreign += [name for number in reads for name in reads[number] if owners.get(name, number) not in (None, number)]
    if foreign:
        raise NoKinds(f"{foreign[0]} is read outside of its layer")


def write_layers(captured: CapturedLayers, whole: WholeGraph, sources: Sequence[int]) -> None:
    """Every layer, then what comes after them."""
    result: Entry | None = None  # of the layer before, as it was written
    for number, source in enumerate((*sources, None)):
        entries = captured.bottom if source is None else captured.layers[source]
        names, numbers = dict(whole.names), dict[int, int]()
        if result is not None:
            given = captured.results[captured.before[source]]
            names[given["name"]] = result["name"]
            numbers = dict(zip(storages(given), storages(result), strict=True))
        again = source is not None and source != number
        names |= own_attributes(captured, source, number) if source is not None else {}
        if again:
            own = dict.fromkeys(n for entry in entries for n in storages(entry) if captured.seen[n] == source)
            numbers |= {storage: whole.storage(storage) for storage in own}
        for entry in entries:
            name = whole.name(entry)
            written = rewritten(entry, name, names, numbers)
            names[entry["name"]] = name
            if source is not None:
                written = moved(written, captured.path, source, number)
                result = written if entry is captured.results[source] else result
            if not again:
                whole.names[entry["name"]] = name
            whole.nodes.append(written)


def own_attributes(captured: CapturedLayers, source: int, number: int) -> dict[str, str]:
    """The names of a layer's weights, for those of the layer that it is written from."""
    given = [entry for entry in captured.attributes if layer_of(entry, captured.path) == source]
    return {entry["name"]: attribute_copy(entry, captured.path, source, number)["name"] for entry in given}
