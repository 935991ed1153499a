"""Sizes by what they count: `bf16[s44, s70, 4096]` reads as `bf16[batch, tokens, 4096]`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from graft.ir.facts import Item
from graft.ops.layout import INPUTS, size_name
from graft.workbench.discover.values import TENSOR, split

SYMBOL = re.compile(r"(?<![%\w.])[su]\d+\b(?!\[)")  # `%s44` is a node, `u8[` a dtype
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
SHAPES = {one.name: one.shape for one in INPUTS}
CACHE = re.compile(r"[kv]_cache_\d+")


@dataclass(frozen=True)
class SizeNames:
    """By symbol. What each name stands for is in `meanings`: for a size without a word, the input that has it."""

    names: dict[str, str] = field(default_factory=dict)
    meanings: dict[str, str] = field(default_factory=dict)

    def text(self, text: str) -> str:
        return SYMBOL.sub(lambda found: self.names.get(found[0], found[0]), text) if self.names else text

    def items(self, items: Sequence[Item]) -> list[Item]:
        return [self.item(item) for item in items]

    def item(self, item: Item) -> Item:
        literals = tuple((slot, self.text(text)) for slot, text in item.literals)
        return replace(item, value=self.text(item.value), literals=literals, call=self.text(item.call))

    def add(self, symbol: str, name: str, meaning: str) -> None:
        """A name is given once: another symbol that would have it too gets a number behind it."""
        taken = set(self.names.values())
        number, free = 1, name
        while free in taken:
            number += 1
            free = name + str(number).translate(SUBSCRIPTS)
        self.names[symbol] = free
        self.meanings[free] = meaning


def size_names(graphs: Iterable[Sequence[Item]]) -> SizeNames:
    """Read off the inputs: those of a decoder have words (ops/layout.py), a size of another is `x₀` for input x."""
    found = SizeNames()
    for items in graphs:
        inputs = {item.target: item for item in items if item.op == "input"}
        decoder = "input_ids" in inputs
        for name, item in inputs.items():
            shape = TENSOR.fullmatch(item.value)
            for dim, size in enumerate(split(shape[2]) if shape else ()):
                name_size(found, name, dim, size, decoder)
    return found


def name_size(found: SizeNames, name: str, dim: int, size: str, decoder: bool) -> None:
    symbols = SYMBOL.findall(size)
    if len(symbols) != 1 or symbols[0] in found.names:
        return
    word = word_of(name, dim) if decoder else ""
    # `s25 + 1` is where a length of sequences is read off, too; else only a plain symbol has the input's name
    if word:
        found.add(symbols[0], word, f"{word}: size {dim} of {name}")
    elif size == symbols[0]:
        short = name + str(dim).translate(SUBSCRIPTS)
        found.add(symbols[0], short, f"size {dim} of {name}")


def word_of(name: str, dim: int) -> str:
    """`tokens` for the second size of input_ids. The row that packed tokens stand in was the batch."""
    if CACHE.fullmatch(name):
        return "cache_blocks" if dim == 0 else ""
    shape: Mapping[int, str | int] = dict(enumerate(SHAPES.get(name, ())))
    size = shape.get(dim, "")
    return "batch" if size == 1 else size_name(size)[0] if isinstance(size, str) else ""
