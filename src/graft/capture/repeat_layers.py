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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graft.capture.layer_kinds import LayerKinds, NoKinds
from graft.ir.io.symbols import evaluate

Entry = dict[str, Any]


@dataclass(frozen=True)
class CapturedLayers:
    """attributes, top, bottom: entries of the graph outside of the layers. layers: the calls of each captured one.
    results: what each gives to the next. seen: in which layer (-1: above all) a storage is met first. sizes: of the
    symbols, two that sizes are compared with."""

    path: str
    attributes: list[Entry]
    top: list[Entry]
    layers: list[list[Entry]]
    bottom: list[Entry]
    results: list[Entry]
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
        """A new one, with the contents of another."""
        self.alike += self.alike[like : like + 1]
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
        positions = [at for at, number in enumerate(found.chosen) if found.kinds[number] == kind]
        if found.kinds.count(kind) > len(positions):
            check_alike(captured, positions[1], positions[-1])
            models[kind] = positions[1]
    sources = [found.chosen.index(n) if n in found.chosen else models[kind] for n, kind in enumerate(found.kinds)]
    whole = WholeGraph(1 + max(captured.seen, default=-1), [*data.get("alike", ())])
    for entry in repeated(captured.attributes, found.path, sources, attribute_copy):
        whole.keep(entry)
    for entry in captured.top:
        whole.keep(entry)
    write_layers(captured, whole, found, sources)
    state = repeated([{"name": key, **spec} for key, spec in data["state"].items()], found.path, sources, state_copy)
    found_state = {entry["name"]: {key: value for key, value in entry.items() if key != "name"} for entry in state}
    return {**data, "nodes": whole.nodes, "state": found_state} | ({"alike": whole.alike} if "alike" in data else {})


def layer_at(path: str, text: str) -> int | None:
    """The position of the layer in whose name `text` is."""
    found = re.match(rf"{re.escape(path)}\.(\d+)(?:\.|$)", text)
    return int(found[1]) if found else None


def layer_of(entry: Entry, path: str) -> int | None:
    if entry["op"] == "get_attr":
        return layer_at(path, entry["target"])
    return next((at for _, where, _ in entry["modules"] if (at := layer_at(path, where)) is not None), None)


def take_apart(data: Mapping[str, Any], found: LayerKinds) -> CapturedLayers:
    nodes = data["nodes"]
    attributes = [entry for entry in nodes if entry["op"] == "get_attr"]
    calls = [entry for entry in nodes if entry["op"] != "get_attr"]
    layers: list[list[Entry]] = [[] for _ in found.chosen]
    top, bottom, last, seen = list[Entry](), list[Entry](), -1, dict[int, int]()
    for entry in calls:
        at = layer_of(entry, found.path)
        if at is None:
            (top if last < 0 else bottom).append(entry)
        elif bottom or at not in (last, last + 1):
            raise NoKinds(f"{(bottom or [entry])[0]['name']} is between its layers")
        else:
            layers[at].append(entry)
            last = at
        for storage in storages(entry):
            seen.setdefault(storage, last)
    if not all(layers):
        raise NoKinds("a layer has no nodes of its own")
    symbols = [symbol["name"] for symbol in data["symbols"]]
    sizes = [{name: first + 2 * at for at, name in enumerate(symbols)} for first in (11, 1_000)]
    return CapturedLayers(found.path, attributes, top, layers, bottom, results_of(layers, bottom), seen, sizes)


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


def references(entry: Entry) -> Iterator[str]:
    yield from (name["node"] for name in objects((entry["args"], entry["kwargs"]), "node"))


def storages(entry: Entry) -> Iterator[int]:
    yield from (tensor["tensor"]["storage"] for tensor in objects(entry.get("val"), "tensor"))


def objects(value: Any, key: str) -> Iterator[dict[str, Any]]:
    """The objects with this key, however deep."""
    if isinstance(value, dict):
        if key in value:
            yield value
        else:
            yield from (found for item in value.values() for found in objects(item, key))
    elif isinstance(value, (list, tuple)):
        yield from (found for item in value for found in objects(item, key))


def rewritten(entry: Entry, name: str, names: Mapping[str, str], numbers: Mapping[int, int]) -> Entry:
    """With other names of nodes and other numbers of storages."""

    def change(value: Any) -> Any:
        if isinstance(value, list):
            return [change(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "node" in value:
            return {"node": names[value["node"]]}
        if "tensor" in value:
            number = value["tensor"]["storage"]
            return {"tensor": {**value["tensor"], "storage": numbers.get(number, number)}}
        return {key: change(item) for key, item in value.items()}

    own = {key: change(entry[key]) for key in ("args", "kwargs", "val") if key in entry}
    return {**entry, **own, "name": name}


def with_bytes(entry: Entry, sizes: Sequence[Mapping[str, int]]) -> Entry:
    """Of each storage the bytes at two sizes: torch writes one size in several ways (`a*b`, `a*(b - 1) + a`)."""

    def change(value: Any) -> Any:
        if isinstance(value, list):
            return [change(item) for item in value]
        if isinstance(value, dict) and "tensor" in value:
            text = value["tensor"]["bytes"]
            counted = [evaluate(text, one) for one in sizes] if isinstance(text, str) else text
            return {"tensor": {**value["tensor"], "bytes": counted}}
        return {key: change(item) for key, item in value.items()} if isinstance(value, dict) else value

    return {**entry, "val": change(entry.get("val"))}


def moved(entry: Entry, path: str, old: int, new: int) -> Entry:
    """With the modules of another layer."""
    before, after = f"{path}.{old}", f"{path}.{new}"

    def at(text: str) -> str:
        head, found, tail = text.partition(before)
        return f"{head}{after}{tail}" if found and (not tail or tail[0] == ".") else text

    return {**entry, "modules": [[at(key), at(where), cls] for key, where, cls in entry["modules"]]}


def check_alike(captured: CapturedLayers, second: int, last: int) -> None:
    """That the second layer of a kind, written as the last, is the last."""
    one, other, path = captured.layers[second], captured.layers[last], captured.path
    if len(one) != len(other):
        raise NoKinds(f"its layers have {len(one)} and {len(other)} nodes")
    attributes = [[entry for entry in captured.attributes if layer_of(entry, path) == at] for at in (second, last)]
    names = {name: name for entry in (*captured.attributes, *captured.top) for name in [entry["name"]]}
    names |= {entry["name"]: entry["name"] for layer in captured.layers[:second] for entry in layer}
    names |= {a["name"]: b["name"] for a, b in zip(one, other, strict=True)}
    names[captured.results[second - 1]["name"]] = captured.results[last - 1]["name"]
    for a, b in zip(*attributes, strict=False):
        names[a["name"]] = b["name"]
        if attribute_copy(a, path, second, last) != b:
            raise NoKinds(f"{a['target']} and {b['target']} differ")
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(storages(a), storages(b), strict=False)]
    numbers = dict(pairs)
    carried = next(storages(captured.results[second - 1]), None)
    kept = all(captured.seen[a] >= second or a in (carried, b) for a, b in pairs)
    if len(attributes[0]) != len(attributes[1]) or not kept or len(set(pairs)) != len(numbers):
        raise NoKinds("its layers share other values")
    for a, b in zip(one, other, strict=True):
        copied = moved(rewritten(a, b["name"], names, numbers), path, second, last)
        if with_bytes(copied, captured.sizes) != with_bytes(b, captured.sizes):
            raise NoKinds(f"{a['name']} and {b['name']}, of layers alike, differ")


def write_layers(captured: CapturedLayers, whole: WholeGraph, found: LayerKinds, sources: Sequence[int]) -> None:
    """Every layer, then what comes after them."""
    result: Entry | None = None  # of the layer before, as it was written
    for number, source in enumerate((*sources, len(captured.layers))):
        entries = captured.layers[source] if source < len(captured.layers) else captured.bottom
        names, numbers = dict(whole.names), dict[int, int]()
        if result is not None:
            before = captured.results[source - 1]
            names[before["name"]] = result["name"]
            numbers = dict(zip(storages(before), storages(result), strict=True))
        inside = number < len(sources)
        again = inside and number not in found.chosen
        names |= own_attributes(captured, source, number) if inside else {}
        if again:
            own = dict.fromkeys(n for entry in entries for n in storages(entry) if captured.seen[n] == source)
            numbers |= {storage: whole.storage(storage) for storage in own}
        for entry in entries:
            name = whole.name(entry)
            written = rewritten(entry, name, names, numbers)
            names[entry["name"]] = name
            if inside:
                written = moved(written, captured.path, source, number)
                result = written if entry is captured.results[source] else result
            if not again:
                whole.names[entry["name"]] = name
            whole.nodes.append(written)


def own_attributes(captured: CapturedLayers, source: int, number: int) -> dict[str, str]:
    """The names of a layer's weights, for those of the layer that it is written from."""
    given = [entry for entry in captured.attributes if layer_of(entry, captured.path) == source]
    return {entry["name"]: attribute_copy(entry, captured.path, source, number)["name"] for entry in given}


def repeated(
    entries: Iterable[Entry], path: str, sources: Sequence[int], copy: Callable[[Entry, str, int, int], Entry]
) -> Iterator[Entry]:
    """Entries in their order; each run of those of layers, for all layers."""
    run = list[tuple[int, Entry]]()
    for entry in (*entries, None):
        at = None if entry is None else layer_at(path, entry.get("target", entry["name"]))
        if entry is not None and at is not None:
            run.append((at, entry))
            continue
        for number, source in enumerate(sources if run else ()):
            yield from (copy(one, path, source, number) for position, one in run if position == source)
        run.clear()
        if entry is not None:
            yield entry


def attribute_copy(entry: Entry, path: str, source: int, number: int) -> Entry:
    """An attribute of one layer, of another."""
    flat = path.replace(".", "_")
    name, target = entry["name"], entry["target"]
    if not name.startswith(f"{flat}_{source}_"):
        raise NoKinds(f"{target} is called {name}")
    return {
        **entry,
        "name": f"{flat}_{number}_{name.removeprefix(f'{flat}_{source}_')}",
        "target": f"{path}.{number}.{target.removeprefix(f'{path}.{source}.')}",
    }


def state_copy(entry: Entry, path: str, source: int, number: int) -> Entry:
    return {**entry, "name": f"{path}.{number}.{entry['name'].removeprefix(f'{path}.{source}.')}"}
