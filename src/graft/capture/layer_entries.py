"""Entries of a graph's data (ir/io/serial.py): the layer they belong to, what they read, copies for other layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from graft.capture.layer_kinds import NoKinds
from graft.ir.io.symbols import evaluate

Entry = dict[str, Any]


def layer_at(path: str, text: str) -> int | None:
    """The position of the layer in whose name `text` is."""
    found = re.match(rf"{re.escape(path)}\.(\d+)(?:\.|$)", text)
    return int(found[1]) if found else None


def layer_of(entry: Entry, path: str) -> int | None:
    if entry["op"] == "get_attr":
        return layer_at(path, entry["target"])
    return next((at for _, where, _ in entry["modules"] if (at := layer_at(path, where)) is not None), None)


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
