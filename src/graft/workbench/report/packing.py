"""Nodes as short JSON lists. Ops, shapes, modules and lines repeat in every layer, so each text is stored once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graft.ir.facts import Item, LayerPath, general, shared

HUB = 8  # a value with more readers is a named port on each of them: its edges would cross the whole drawing


class StringTable:
    """Texts by number. `table` goes into the page beside what refers to it."""

    def __init__(self) -> None:
        self.table: list[str] = []
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        number = self.numbers.setdefault(text, len(self.table))
        if number == len(self.table):
            self.table.append(text)
        return number


def pack_item(
    item: Item, strings: StringTable, layer: LayerPath | None = None, parts: Sequence[str] = ()
) -> list[Any]:
    """[name, op, value, module, source, made by, literals, parts]; all but the name by number. The module of a weight
    is that of its target, and the number of the layer stands as `*`. parts: of a merged weight, or of the one that a
    call reads."""
    literals = ", ".join(f"{slot}={text}" for slot, text in item.literals)
    module = item.target if item.op == "weight" else item.module
    merged = " + ".join(general(part, layer) for part in parts)
    fields = (item.op, item.value, general(module, layer), item.source, item.made_by, literals, merged)
    return [item.name, *map(strings, fields)]


class Readers:
    """Which nodes read each one, and which values are ports: those that several layers read, or many nodes."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.of: list[list[int]] = [[] for _ in items]
        for item in items:
            for index in dict.fromkeys(index for _, index in item.inputs):
                self.of[index].append(item.index)
        self.ports = shared(items) | {index for index, found in enumerate(self.of) if len(found) > HUB}

    def kind(self, item: Item) -> int:
        """How a value from elsewhere is drawn: 0 with an edge, 1 as a port, 2 as a weight, 3 as an input."""
        if item.op == "weight":
            return 2
        if item.op == "input":
            return 3
        return int(item.index in self.ports)


def port_name(item: Item) -> str:
    """A size is known by what it counts (`tokens`), all else by its name."""
    return item.value if item.value and "[" not in item.value and item.op != "output" else item.name
