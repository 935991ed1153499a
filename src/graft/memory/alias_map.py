"""Which inputs and buffers a graph writes, and how: the alias map of a compiled module and its part of the report."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import GraphModule, Node

from graft.ir.nodes import is_op, is_weight, where
from graft.memory.writes import Write, state_writes

aten = torch.ops.aten
Kind = Literal["kv_cache_update", "user"]


@dataclass(frozen=True)
class Alias:
    """After a call, `output` (the last write) is the memory of `input`, an argument or a buffer."""

    output: str
    input: str
    kind: Kind


@dataclass(frozen=True)
class StateRecord:
    """How one input or buffer is updated. `reason`: why its new value is computed elsewhere and copied into it."""

    input: str
    owner: Literal["caller", "module"]
    kind: Kind
    how: Literal["in place", "copied back"]
    writes: tuple[str, ...]
    reason: str = ""

    def text(self) -> str:
        line = f"{self.input} ({self.owner}, {self.kind}): {self.how} by {', '.join(self.writes)}"
        return f"{line}: {self.reason}" if self.reason else line


def state_records(
    gm: GraphModule, names: Mapping[Node, str], misses: Mapping[str, str], donated: Collection[str] = ()
) -> tuple[tuple[Alias, ...], tuple[StateRecord, ...]]:
    """The alias map and the record of every written input and buffer, in the order of their first write.

    `misses`: node name → why its update could not be made in place (from update_state_in_place).
    `donated`: inputs that the program itself does not write; their kind is `user`.
    """
    groups: dict[Node, list[Write]] = {}
    for write in state_writes(gm):
        groups.setdefault(write.owner, []).append(write)
    aliases, records = [], []
    for owner, writes in groups.items():
        name = names.get(owner, str(owner.target))
        positional = all(write.positional for write in writes) and name not in donated
        kind: Kind = "kv_cache_update" if positional else "user"
        missed = next((reason for write in writes if (reason := misses.get(write.node.name))), "")
        reason = missed or copied_whole(writes)
        side: Literal["caller", "module"] = "module" if is_weight(owner) else "caller"
        how: Literal["in place", "copied back"] = "copied back" if reason else "in place"
        records.append(StateRecord(name, side, kind, how, tuple(where(write.node) for write in writes), reason))
        if not missed:
            aliases.append(Alias(writes[-1].node.name, name, kind))
    return tuple(aliases), tuple(records)


def copied_whole(writes: list[Write]) -> str:
    for write in writes:
        if is_op(write.node, aten.copy_.default) and not write.positional:
            return f"all of it is computed anew, by %{write.node.args[1]}"
    return ""
