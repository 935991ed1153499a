"""What a node is, apart from its name: the plain facts that two graphs are compared by."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from torch.fx import Graph, Node

from graft.ir.branches import all_nodes
from graft.ir.io.text import call_text, op_text, type_text, value_text
from graft.ir.nodes import OpOverload, leaves, module_path, source_line

# `s44`, `u0`: torch takes the numbers from a counter; `u8[` is a dtype
SYMBOL = re.compile(r"\b[su]\d+\b(?!\[)")
LAYER = re.compile(r"(?:^|(?<=\.))(\d+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Item:
    """One node. `inputs`: the indices of the nodes it reads, by slot; `literals`: its other arguments, by slot."""

    index: int
    name: str
    op: str  # `aten.mul.Tensor`, `input`, `weight`, `output`
    target: str  # the name of an input or a weight, else ''
    inputs: tuple[tuple[str, int], ...]
    literals: tuple[tuple[str, str], ...]
    module: str
    source: str  # the line that made it: `modeling_llama.py:63`
    made_by: str  # the transform that made it
    value: str  # `bf16[s44, s70, 32]@meta`
    call: str  # `%mul_3 = aten.mul.Tensor(%weight, %to_5)`

    @property
    def is_leaf(self) -> bool:
        """An input or a weight: it is known by its name."""
        return self.op in ("input", "weight")

    @property
    def site(self) -> str:
        """Where it stands in the model: its module, or the name of a weight."""
        return self.target if self.op == "weight" else self.module

    def text(self) -> str:
        """The line that a dump has for it."""
        kind = f" : {self.value}" if self.value else ""
        origin = " | ".join(filter(None, (self.module, self.source, self.made_by)))
        return f"{self.call}{kind}" + (f"    # {origin}" if origin else "")


@dataclass(frozen=True)
class LayerPath:
    """The part of a module path up to its first number: `model.layers` and 7."""

    stack: str
    index: int


@lru_cache(1 << 16)  # asked for every node and every input of it, with a few hundred different paths
def layer_of(path: str) -> LayerPath | None:
    found = LAYER.search(path)
    return LayerPath(path[: found.start()].rstrip("."), int(found[1])) if found else None


def homes(items: Sequence[Item]) -> list[LayerPath | None]:
    """The layer of each node. A value that several layers read belongs to none, wherever it was first computed."""
    several = shared(items)
    return [None if item.index in several else layer_of(item.site) for item in items]


def shared(items: Sequence[Item]) -> set[int]:
    """The nodes that several layers read."""
    read_in: dict[int, set[LayerPath]] = defaultdict(set)
    for item in items:
        layer = layer_of(item.site)
        for _, index in item.inputs:
            if layer is not None:
                read_in[index].add(layer)
    return {index for index, layers in read_in.items() if len(layers) > 1}


def general(path: str, layer: LayerPath | None) -> str:
    """`model.layers.7.mlp` and `k_cache_7` in layer 7 → `model.layers.*.mlp` and `k_cache_*`."""
    if layer is None:
        return path
    if layer_of(path) == layer:
        return LAYER.sub("*", path, count=1)
    return re.sub(rf"_{layer.index}$", "_*", path)


class Sources:
    """What a node reads, said without names, so that it is equal for equal layers.

    A value of this layer or of the one above is its op and module, a weight its name without the number. What several
    layers read is itself. The first layer reads something else in place of a layer above; `blurred` leaves out what.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self.items, self.homes, self.shared = items, homes(items), shared(items)

    def __call__(self, index: int, layer: LayerPath | None, *, blurred: bool = False) -> Hashable:
        item, home = self.items[index], self.homes[index]
        if index in self.shared:
            return item.name
        if item.is_leaf:
            name = general(item.target, layer)
            return item.value if blurred and item.op == "input" and name == item.target else (item.op, name)
        if layer is not None and home == layer:
            return item.op, general(item.module, layer)
        above = LayerPath(layer.stack, layer.index - 1) if layer is not None else None
        if home not in (None, above):
            return home, item.op, item.module
        return item.value if blurred else (item.value, item.op, general(item.module, above))


def own_shape(item: Item, layer: LayerPath | None) -> Hashable:
    """A node without its name, the number of its layer and what it reads."""
    origin = general(item.module, layer), item.source, item.made_by
    return item.op, general(item.target, layer), item.literals, item.value, *origin


def read_graph(graph: Graph) -> list[Item]:
    """The facts of a live graph, or of one that was loaded from a dump, and of the graphs inside of it."""
    nodes = list(all_nodes(graph))
    numbers = {node: index for index, node in enumerate(nodes)}
    lines: dict[str, str] = {}  # equal layers have equal stack traces, and reading a line off one takes 30 µs
    return [read_node(node, numbers, lines) for node in nodes]


def read_node(node: Node, numbers: dict[Node, int], lines: dict[str, str]) -> Item:
    inputs, literals = [], []
    for slot, value in arguments(node):
        if isinstance(value, Node):
            inputs.append((slot, numbers[value]))
        else:
            literals.append((slot, value_text(value)))
    trace = node.meta.get("stack_trace") or ""
    if trace not in lines:
        lines[trace] = source_line(node) or ("torch" if trace else "")
    return Item(
        numbers[node],
        node.name,
        {"placeholder": "input", "get_attr": "weight"}.get(node.op) or op_text(node),
        str(node.target) if node.op in ("placeholder", "get_attr") else "",
        tuple(inputs),
        tuple(literals),
        module_path(node),
        lines[trace],
        node.meta.get("made_by", ""),
        type_text(node).removeprefix(" : "),
        call_text(node),
    )


def arguments(node: Node) -> Iterator[tuple[str, Any]]:
    """Every leaf of the arguments with its slot: the schema's name, and the site in a list (`tensors[1]`)."""
    if node.op == "placeholder":
        return
    names = slot_names(node.target) if node.op == "call_function" else ()
    for index, value in enumerate(node.args):
        yield from flat(names[index] if index < len(names) else str(index), value)
    for name, value in node.kwargs.items():
        yield from flat(name, value)


@cache
def slot_names(target: Any) -> tuple[str, ...]:
    """The arguments of an op by name. Kept: torch makes a new object of every argument that is asked for."""
    return tuple(a.name for a in target._schema.arguments) if isinstance(target, OpOverload) else ()


def flat(slot: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)) and any(isinstance(leaf, Node) for leaf in leaves(value)):
        for index, item in enumerate(value):
            yield from flat(f"{slot}[{index}]", item)
    else:
        yield slot, value


def same_symbols(before: Sequence[Item], after: list[Item]) -> list[Item]:
    """`after` with its symbols under their names in `before`, which are read off inputs of one name."""
    known = {item.target: item.value for item in before if item.op == "input"}
    names: dict[str, str] = {}
    for item in after:
        if item.op == "input" and item.target in known:
            ours, theirs = SYMBOL.findall(known[item.target]), SYMBOL.findall(item.value)
            names |= {new: old for new, old in zip(theirs, ours, strict=False) if new not in names}
    if all(new == old for new, old in names.items()):
        return after
    return [replace(i, value=SYMBOL.sub(lambda found: names.get(found[0], found[0]), i.value)) for i in after]
