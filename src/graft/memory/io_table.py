"""What a graph takes, keeps and gives: name, dtype, sizes, whose memory, in one table (`compiled.signature`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from graft.ir.nodes import leaves, outlives_call, output_node, placeholders, static_int, val
from graft.ir.program.signature import SYMBOL
from graft.memory.alias_map import Alias
from graft.memory.writes import owner_of, state_writes

Role = Literal["input", "state", "result"]


@dataclass(frozen=True)
class IoEntry:
    """One tensor or number. `alias`: of an input or state the last write to it, of a result whose memory it is in.

    kind: that of the alias (`kv_cache_update` or `user`), `view` for a result in memory that the graph does not
    write, empty where there is none.
    """

    role: Role
    name: str
    dtype: str  # of what is no tensor, its type
    sizes: tuple[int | str, ...] = ()
    device: str = ""
    alias: str = ""
    kind: str = ""

    def text(self) -> str:
        sizes = f"[{', '.join(map(str, self.sizes))}] on {self.device}" if self.device else ""
        verb = "in the memory of" if self.role == "result" else "written by"
        alias = f"  {verb} {self.alias} ({self.kind})" if self.alias else ""
        return f"{self.role:6}  {self.name:16} {self.dtype}{sizes}{alias}"


@dataclass(frozen=True)
class IoTable:
    """`sizes`: each symbol in them, with where a call binds it and the range that the graph is for."""

    entries: tuple[IoEntry, ...]
    sizes: Mapping[str, str] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[IoEntry, ...]:
        return tuple(entry for entry in self.entries if entry.role == "input")

    @property
    def state(self) -> tuple[IoEntry, ...]:
        """Buffers that the program writes."""
        return tuple(entry for entry in self.entries if entry.role == "state")

    @property
    def results(self) -> tuple[IoEntry, ...]:
        return tuple(entry for entry in self.entries if entry.role == "result")

    def __str__(self) -> str:
        return "\n".join(
            (*(entry.text() for entry in self.entries), *(f"size    {s:16} {t}" for s, t in self.sizes.items()))
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class IoNames:
    """What a caller calls things that the graph has other names for."""

    inputs: Mapping[Node, str]
    results: Sequence[str]
    symbols: Mapping[str, str] = field(default_factory=dict)


def io_table(gm: GraphModule, names: IoNames, aliases: Iterable[Alias], sizes: Mapping[str, str]) -> IoTable:
    """The table of a transformed graph. `sizes`: by the graph's symbols."""
    known = {alias.input: alias for alias in aliases}
    state = dict.fromkeys(write.owner for write in state_writes(gm) if write.owner.op == "get_attr")
    returned = list(leaves(output_node(gm.graph).args[0]))[: len(names.results)]
    owners = [*((("input"), node) for node in placeholders(gm.graph)), *(("state", node) for node in state)]
    entries = [owned(role, node, names, known) for role, node in owners]
    entries += [result(value, name, names, known) for name, value in zip(names.results, returned, strict=True)]
    used = {symbol for entry in entries for size in entry.sizes for symbol in SYMBOL.findall(str(size))}
    named = {named_size(symbol, names.symbols): text for symbol, text in sizes.items()}
    return IoTable(tuple(entries), {symbol: text for symbol, text in named.items() if symbol in used})


def owned(role: Any, node: Node, names: IoNames, known: Mapping[str, Alias]) -> IoEntry:
    name = names.inputs.get(node, str(node.target))
    alias = known.get(name)
    written: dict[str, Any] = {"alias": f"%{alias.output}", "kind": alias.kind} if alias else {}
    return IoEntry(role, name, **described(val(node), names.symbols), **written)


def result(value: Any, name: str, names: IoNames, known: Mapping[str, Alias]) -> IoEntry:
    owner = owner_of(value) if isinstance(value, Node) else None
    shared: dict[str, Any] = {}
    if owner is not None and outlives_call(owner) and isinstance(val(value), torch.Tensor):
        of = names.inputs.get(owner, str(owner.target))
        shared = {"alias": of, "kind": known[of].kind if of in known else "view"}
    return IoEntry("result", name, **described(val(value), names.symbols), **shared)


def described(value: Any, symbols: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        return {"dtype": "int" if isinstance(value, torch.SymInt) else type(value).__name__}
    sizes = tuple(
        number if (number := static_int(size)) is not None else named_size(str(size), symbols) for size in value.shape
    )
    return {"dtype": str(value.dtype).removeprefix("torch."), "sizes": sizes, "device": str(value.device)}


def named_size(text: str, symbols: Mapping[str, str]) -> str:
    """`2*s77` as `2*batch`."""
    return SYMBOL.sub(lambda found: symbols.get(found[0], found[0]), text)
