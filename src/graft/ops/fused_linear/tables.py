"""Tables of measurements: for a shape and a number of tokens the kernel that was fastest.

A file, as it comes with graft (tuned.json) and as `graft tune` writes it:

    {"plain 4096x14336": {"device": "NVIDIA H200", "tokens": {
        "1": {"kind": "matvec", "rows": 2, "warps": 4, "us": 26.1, "measured": "in a step"},
        "64": {"kind": "library", "us": 29.3}}}}

The key is the format of the weights, rows of the result x depth, then `gated` and `norm` where they hold. A kind is
`matvec` or `gemm` with its options (those left out have their defaults), `library` (torch's own GEMM, for plain
weights) or `default` (the tensor-core kernel with sizes that fit every call, for quantized ones).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graft.base.errors import TableError, near
from graft.base.files import write_whole
from graft.ops.fused_linear.kinds import KINDS, How, LinearShape, count_text, how_problem, kind_of

MEASURED = ("alone", "in a step")


@dataclass(frozen=True)
class TunedEntry:
    """What was fastest for one shape and number of tokens, and how that was found."""

    how: How
    us: float | None  # by itself; None: it was chosen in whole steps alone
    device: str
    measured: str = "alone"  # or "in a step"


Table = dict[LinearShape, dict[int, TunedEntry]]


def merge(*tables: Table) -> Table:
    """All measurements; of two for one shape and number of tokens the later table's."""
    merged: Table = {}
    for table in tables:
        for shape, counts in table.items():
            merged.setdefault(shape, {}).update(counts)
    return merged


def read_table(path: Path) -> Table:
    """Everything in the file is understood, or TableError names what is not."""
    try:
        content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(path, f"cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise TableError(path, f"not JSON: {error}") from error
    return parse_table(content, path)


def parse_table(content: object, path: Path) -> Table:
    table: Table = {}
    for key, given in mapping(content, "the whole file", path).items():
        shape = LinearShape.parse(key)
        if shape is None:
            raise TableError(path, f"unknown shape {key!r}; one is written like 'plain 14336x4096 gated norm'")
        entry = mapping(given, repr(key), path)
        check_keys(entry, {"device", "tokens"}, {"device", "tokens"}, repr(key), path)
        device = entry["device"]
        if not isinstance(device, str):
            raise TableError(path, f"{key!r}: device must be the name of one, but is {device!r}")
        table[shape] = {
            read_count(count, key, path): parse_entry(one, shape, count, device, path)
            for count, one in mapping(entry["tokens"], f"{key!r}, tokens", path).items()
        }
    return table


def parse_entry(given: object, shape: LinearShape, count: str, device: str, path: Path) -> TunedEntry:
    where = f"{shape.key()!r}, {count_text(int(count))}"
    entry = mapping(given, where, path)
    kinds = {**KINDS, kind_of(None, shape.format): None}
    kind = str(entry.get("kind"))
    if kind not in kinds:
        raise TableError(path, f"{where}: unknown kind {kind!r}{near(kind, kinds)}")
    cls = kinds[kind]
    options = {} if cls is None else asdict(cls())
    timed = entry.get("measured") != "in a step"
    check_keys(entry, {"kind", "us", "measured", *options}, {"us"} if timed else set(), where, path)
    for name, usual in options.items():
        value = entry.get(name, usual)
        if type(value) is not type(usual) or value < min(1, usual):
            kind_text = "true or false" if isinstance(usual, bool) else f"a whole number of at least {min(1, usual)}"
            raise TableError(path, f"{where}: {name} must be {kind_text}, but is {value!r}")
    us = entry.get("us")
    if "us" in entry and (not isinstance(us, (int, float)) or isinstance(us, bool)):
        raise TableError(path, f"{where}: us must be a number, but is {us!r}")
    measured = entry.get("measured", MEASURED[0])
    if measured not in MEASURED:
        raise TableError(path, f"{where}: measured must be one of {', '.join(MEASURED)}, but is {measured!r}")
    how = None if cls is None else cls(**{name: entry[name] for name in options if name in entry})
    problem = how_problem(how, shape, int(count))
    if problem is not None:
        raise TableError(path, f"{where}: {problem}")
    return TunedEntry(how, None if us is None else float(us), device, measured)


def mapping(value: object, where: str, path: Path) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TableError(path, f"{where} must be an object, but is {value!r:.60}")
    return value


def check_keys(entry: Mapping[str, Any], known: set[str], needed: set[str], where: str, path: Path) -> None:
    for key in entry:
        if key not in known:
            raise TableError(path, f"{where}: unknown key {key!r}{near(key, known)}")
    for key in sorted(needed - set(entry)):
        raise TableError(path, f"{where}: {key!r} is missing")


def read_count(text: str, key: str, path: Path) -> int:
    if not re.fullmatch(r"[1-9]\d*", text, re.ASCII):
        raise TableError(path, f"{key!r}: tokens must be counted by whole numbers of at least 1, not {text!r}")
    return int(text)


def table_json(table: Table) -> dict[str, Any]:
    """As it stands in a file. A file names one device for a shape."""
    return {
        shape.key(): {
            "device": next(iter(counts.values())).device,
            "tokens": {str(count): entry_json(counts[count], shape) for count in sorted(counts)},
        }
        for shape, counts in table.items()
        if counts
    }


def entry_json(entry: TunedEntry, shape: LinearShape) -> dict[str, Any]:
    options = {} if entry.how is None else asdict(entry.how)
    return {
        "kind": kind_of(entry.how, shape.format),
        **options,
        **({} if entry.us is None else {"us": round(entry.us, 2)}),
        "measured": entry.measured,
    }


def write_table(table: Table, path: Path) -> None:
    """Whole or not at all. What the file has beside it stays, but not what another device gave for the same shape."""
    there = read_table(path) if path.exists() else {}
    kept = {
        shape: {count: entry for count, entry in counts.items() if entry.device in devices(table.get(shape, counts))}
        for shape, counts in there.items()
    }
    write_whole(path, json.dumps(table_json(merge(kept, table)), indent=1) + "\n")


def devices(counts: Mapping[int, TunedEntry]) -> set[str]:
    return {entry.device for entry in counts.values()}
